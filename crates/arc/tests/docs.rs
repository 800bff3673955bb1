//! What documents name is there: every path and every symbol in backquotes, in every Markdown file of the project.
#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Folders that hold nothing of the project's own.
const NOT_OURS: [&str; 3] = ["target", "node_modules", "results"];

/// Paths and names of others, which documents speak of.
const OTHERS: [&str; 2] = ["GGML_NATIVE", "encoding/encoding_dsv4.py"];

fn walk(dir: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).expect("the project is there").flatten() {
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        // `.ci` and what git itself needs are in hidden folders.
        if path.is_dir() && !NOT_OURS.contains(&&*name) && (!name.starts_with('.') || name == ".ci") {
            walk(&path, files);
        } else if path.is_file() {
            files.push(path);
        }
    }
}

fn is_word(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// Words of a source, underscores included.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

/// Inline code of a Markdown text, without fenced blocks, with its line.
fn spans(text: &str) -> Vec<(usize, String)> {
    let (mut fenced, mut spans) = (false, Vec::new());
    for (at, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced {
            spans.extend(line.split('`').skip(1).step_by(2).map(|span| (at + 1, span.to_owned())));
        }
    }
    spans
}

struct Project {
    /// Relative to the root, with `/`.
    paths: Vec<String>,
    words: HashSet<String>,
}

impl Project {
    /// What is wrong with a span, if it is a path or a symbol.
    fn fault(&self, span: &str) -> Option<&'static str> {
        const SUFFIXES: [&str; 9] = [".rs", ".cu", ".cuh", ".sh", ".py", ".md", ".json", ".toml", ".txt"];
        if OTHERS.contains(&span) {
            return None;
        }
        let file = SUFFIXES.iter().any(|suffix| span.ends_with(suffix))
            && !span.starts_with('.')
            && !span.contains([' ', '*', '<']);
        let folder = span.ends_with('/') && span.len() > 1 && !span.contains([' ', '<', ':']);
        if file || folder {
            let wanted = span.trim_start_matches("./").trim_end_matches('/');
            let there = self.paths.iter().any(|path| {
                let whole = format!("/{path}");
                if folder { whole.contains(&format!("/{wanted}/")) } else { whole.ends_with(&format!("/{wanted}")) }
            });
            return (!there).then_some("no such file");
        }
        let symbol = span.trim_end_matches("()");
        let parts: Vec<&str> = symbol.split("::").collect();
        // A single word in lower case is as likely an English one, or somebody's value.
        let named =
            parts.len() > 1 || symbol != span || symbol.contains('_') || symbol.chars().skip(1).any(char::is_uppercase);
        if named && parts.iter().all(|part| is_word(part)) {
            let there = parts.iter().all(|part| self.words.contains(*part));
            return (!there).then_some("no such symbol");
        }
        let flag = span.strip_prefix("--").map(|flag| flag.split([' ', '=']).next().unwrap_or(flag).replace('-', "_"));
        if let Some(flag) = flag.filter(|flag| is_word(flag)) {
            return (!self.words.contains(&flag)).then_some("no such flag");
        }
        None
    }
}

#[test]
fn what_documents_name_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the project is there");
    let mut files = Vec::new();
    walk(&root, &mut files);
    let relative = |path: &Path| path.strip_prefix(&root).expect("below the root").to_string_lossy().replace('\\', "/");
    let mut project = Project { paths: files.iter().map(|path| relative(path)).collect(), words: HashSet::new() };
    let this = Path::new(file!()).file_name();
    for path in &files {
        let source = path
            .extension()
            .is_some_and(|ext| ["rs", "cu", "cuh", "sh", "py", "toml", "cpp", "json"].iter().any(|e| ext == *e));
        if (source || path.extension().is_none())
            && path.file_name() != this
            && let Ok(text) = fs::read_to_string(path)
        {
            project.words.extend(words(&text).map(str::to_owned));
        }
    }
    let (mut faults, mut documents, mut seen) = (Vec::new(), 0, 0);
    for path in files.iter().filter(|path| path.extension().is_some_and(|ext| ext == "md")) {
        documents += 1;
        for (line, span) in spans(&fs::read_to_string(path).expect("text")) {
            seen += 1;
            if let Some(fault) = project.fault(&span) {
                faults.push(format!("{}:{line}: `{span}`: {fault}", relative(path)));
            }
        }
    }
    assert!(documents >= 4 && seen > 200, "{documents} documents with {seen} spans");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    // The same eyes see what is not there.
    for (span, fault) in [
        ("crates/arc/src/nothing.rs", Some("no such file")),
        ("nothing/", Some("no such file")),
        ("EngineHandle::submitt", Some("no such symbol")),
        ("step_comit", Some("no such symbol")),
        ("--burrst 3", Some("no such flag")),
        ("EngineHandle::submit", None),
        ("--device-loop", None),
        ("layers.cu", None),
    ] {
        assert_eq!(project.fault(span), fault, "{span}");
    }
}
