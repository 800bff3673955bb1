//! The tokenizer of a model file: from GGUF metadata, or from the JSON files beside safetensors.

use std::{io::Read, path::Path};

use arc_engine::load::{ModelFile, open_regular, safetensors::SafetensorsFile};

use super::OpenError;
use crate::text::{Tokenizer, TokenizerSpec};

/// Largest `tokenizer.json`: the largest that is known has 33 MB.
const JSON_MAX: u64 = 128 << 20;

/// Reads and checks it. Errors: the file's, with the name of what is missing or wrong.
pub(super) fn read(file: &ModelFile) -> Result<Tokenizer, OpenError> {
    match file {
        ModelFile::Gguf(file) => {
            let path = file.metadata().path();
            let spec = TokenizerSpec::from_gguf(file.metadata())?;
            Tokenizer::from_spec(spec).map_err(|e| OpenError::tokenizer(path, e))
        }
        ModelFile::Safetensors(file) => json_tokenizer(file),
        ModelFile::Synthetic(model) => Err(OpenError::Random { name: model.name.clone() }),
    }
}

fn json_tokenizer(file: &SafetensorsFile) -> Result<Tokenizer, OpenError> {
    let path = file.folder().join("tokenizer.json");
    if !path.exists() {
        return Err(OpenError::NoTokenizer { folder: file.folder().to_owned() });
    }
    let json = read_text(&path)?;
    let config_path = file.folder().join("tokenizer_config.json");
    let config = if config_path.exists() { Some(read_text(&config_path)?) } else { None };
    let mut spec = TokenizerSpec::from_json(&json, config.as_deref()).map_err(|e| OpenError::tokenizer(&path, e))?;
    // Newer exports keep the template in a file of its own.
    let template_path = file.folder().join("chat_template.jinja");
    if spec.chat_template.is_none() && template_path.exists() {
        spec.chat_template = Some(read_text(&template_path)?);
    }
    Tokenizer::from_spec(spec).map_err(|e| OpenError::tokenizer(&path, e))
}

fn read_text(path: &Path) -> Result<String, OpenError> {
    let unreadable = |source| OpenError::Unreadable { path: path.to_owned(), source };
    let mut text = String::new();
    let file = open_regular(path).map_err(unreadable)?;
    let n = file.take(JSON_MAX + 1).read_to_string(&mut text).map_err(unreadable)?;
    if n as u64 > JSON_MAX {
        return Err(unreadable(std::io::Error::other(format!("it is larger than {JSON_MAX} bytes"))));
    }
    Ok(text)
}
