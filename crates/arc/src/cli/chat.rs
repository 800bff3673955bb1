//! `arc chat`: a conversation.

use std::{
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::{Context, Result};
use arc::{
    config::{Config, suggestion},
    model_text::{ChatMessage, Role},
    open::{self, Running, Sizes},
};
use rustyline::{DefaultEditor, error::ReadlineError};

use super::{
    EngineFlags,
    generate::{self, Outcome, SamplingArgs},
    open_model,
};

const HELP: &str = "\
/clear         forget the conversation, keep the instructions
/system TEXT   set the instructions (without TEXT: remove them) and forget the conversation
/save FILE     write the conversation as JSON
/stats         what the last answer took
/help          this list
/exit          leave (also Ctrl-D)
Ctrl-C ends an answer, not the conversation. A line that ends in \\ goes on in the next.";

const COMMANDS: [&str; 7] = ["/clear", "/system", "/save", "/stats", "/help", "/exit", "/quit"];

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Name or path of the model
    model: String,
    /// Instructions that stand before the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    pub flags: EngineFlags,
}

pub fn run(args: &Args, config: &Config) -> Result<ExitCode> {
    args.sampling.check()?;
    let model = open_model(&args.model, config)?;
    let running = open::start(&model, config, Sizes::slots(1))?;
    // Asked now, so that a model that cannot chat says so before the first line is typed.
    running.text.encode_chat(&[ChatMessage::new(Role::User, "Hello")], None)?;
    generate::catch_interrupts()?;
    let mut editor = DefaultEditor::new().context("cannot read from this terminal")?;
    let history = history_file(config);
    if let Some(path) = history.as_ref().filter(|path| path.exists())
        && let Err(error) = editor.load_history(path)
    {
        tracing::warn!(path = %path.display(), %error, "cannot read the history");
    }
    let mut chat = Chat { running, sampling: &args.sampling, messages: Vec::new(), last: None };
    chat.set_system(args.system.as_deref().unwrap_or_default());
    eprintln!("{} is ready; /help lists commands", args.model);
    while let Some(line) = read_input(&mut editor)? {
        let line = line.trim();
        if line.is_empty() {
            continue;
        }
        let _ = editor.add_history_entry(line);
        if let Some(command) = line.strip_prefix('/') {
            if !chat.command(command)? {
                break;
            }
        } else {
            chat.say(line)?;
        }
    }
    if let Some(path) = &history
        && let Err(error) = editor.save_history(path)
    {
        tracing::warn!(path = %path.display(), %error, "cannot write the history");
    }
    Ok(ExitCode::SUCCESS)
}

/// A line, or several joined by backslashes; `None` at the end of input.
fn read_input(editor: &mut DefaultEditor) -> Result<Option<String>> {
    let mut input = String::new();
    loop {
        match editor.readline(if input.is_empty() { "> " } else { ". " }) {
            Ok(line) => match line.strip_suffix('\\') {
                Some(part) => {
                    input.push_str(part);
                    input.push('\n');
                }
                None => {
                    input.push_str(&line);
                    return Ok(Some(input));
                }
            },
            Err(ReadlineError::Eof) => return Ok(None),
            Err(ReadlineError::Interrupted) => {
                input.clear();
                eprintln!("(/exit or Ctrl-D leaves)");
            }
            Err(e) => return Err(e).context("cannot read a line"),
        }
    }
}

struct Chat<'a> {
    running: Running,
    sampling: &'a SamplingArgs,
    messages: Vec<ChatMessage>,
    last: Option<(Outcome, u64)>,
}

impl Chat<'_> {
    fn set_system(&mut self, text: &str) {
        self.messages.clear();
        if !text.is_empty() {
            self.messages.push(ChatMessage::new(Role::System, text));
        }
    }

    /// Runs a command, without its slash. Returns whether the conversation goes on.
    fn command(&mut self, command: &str) -> Result<bool> {
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        let rest = rest.trim();
        match name {
            "exit" | "quit" => return Ok(false),
            "help" => eprintln!("{HELP}"),
            "clear" => self.messages.retain(|m| m.role == Role::System),
            "system" => self.set_system(rest),
            "stats" => match &self.last {
                Some((outcome, seed)) => eprintln!("{}", outcome.summary(*seed)),
                None => eprintln!("nothing was answered yet"),
            },
            "save" if rest.is_empty() => eprintln!("/save needs a file name"),
            "save" => match self.save(rest) {
                Ok(()) => eprintln!("saved {} messages to {rest}", self.messages.len()),
                Err(e) => eprintln!("cannot save to {rest}: {e}"),
            },
            _ => eprintln!("there is no /{name}{}", suggestion(&format!("/{name}"), COMMANDS)),
        }
        Ok(true)
    }

    fn save(&self, path: &str) -> io::Result<()> {
        let messages: Vec<_> = self.messages.iter().map(ChatMessage::to_json).collect();
        std::fs::write(path, format!("{:#}\n", serde_json::Value::from(messages)))
    }

    /// Answers. What goes wrong with one message is said, and the message forgotten; only a lost terminal ends the chat.
    fn say(&mut self, line: &str) -> Result<()> {
        self.messages.push(ChatMessage::new(Role::User, line));
        let mut out = io::stdout().lock();
        let mut shown = |piece: &str| {
            out.write_all(piece.as_bytes())?;
            out.flush()
        };
        let mut seed = 0;
        let outcome =
            self.running.text.encode_chat(&self.messages, None).map_err(anyhow::Error::from).and_then(|ids| {
                let request = self.sampling.request(&self.running.text, ids);
                seed = request.sampling.seed;
                generate::answer(&self.running.engine, &self.running.text, request, self.sampling.stops(), &mut shown)
            });
        match outcome {
            Ok(outcome) => {
                shown("\n")?;
                self.messages.push(ChatMessage::new(Role::Assistant, outcome.text.as_str()));
                self.last = Some((outcome, seed));
                Ok(())
            }
            Err(e) if super::is_broken_pipe(&e) || self.running.engine.fault().is_some() => Err(e),
            Err(e) => {
                self.messages.pop();
                eprintln!("error: {}", super::sentence(&e));
                Ok(())
            }
        }
    }
}

fn history_file(config: &Config) -> Option<PathBuf> {
    std::fs::create_dir_all(&config.cache_dir).ok()?;
    Some(config.cache_dir.join("history"))
}
