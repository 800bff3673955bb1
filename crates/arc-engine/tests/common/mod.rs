//! What the tests of model files share.
#![allow(dead_code, reason = "each test file uses its part")]

use std::path::{Path, PathBuf};

/// A folder that goes away with the test.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("arc-load-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).expect("the temporary folder can be written");
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, bytes).expect("the folder can be written");
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A real model, from the folder that `ARC_TEST_MODELS` names, else from the cache of `arc pull`.
pub fn real_model(name: &str) -> PathBuf {
    let folder = std::env::var_os("ARC_TEST_MODELS").map_or_else(
        || PathBuf::from(std::env::var_os("HOME").expect("a home folder")).join(".cache/arc/models"),
        PathBuf::from,
    );
    let path = folder.join(name);
    assert!(path.is_file(), "{} is absent: fetch it, or set ARC_TEST_MODELS to the folder that has it", path.display());
    path
}
