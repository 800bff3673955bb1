//! A file mapped for reading: weights are read where the page cache holds them, and given back once repacked.

use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::ops::Range;
use std::path::Path;

use memmap2::{Mmap, UncheckedAdvice};

/// A read-only mapping of a whole file. Opening it reads nothing.
///
/// NOTE: the file must stay as it is while it is mapped. A file cut short ends the process with SIGBUS when a page past
/// its new end is read, and a file written to in place changes under its readers; a mapping cannot guard against
/// either. Replacing a model by renaming a new file over it is safe: the mapping keeps the old one.
#[derive(Debug)]
pub struct Mapped {
    /// `None` for an empty file, which cannot be mapped.
    map: Option<Mmap>,
}

impl Mapped {
    /// Maps the file at `path`. Errors: the file cannot be opened, is no regular file, or is larger than the address
    /// space.
    pub fn open(path: &Path) -> Result<Self> {
        // Asked before opening: to open a pipe that nobody writes to waits for ever.
        if !std::fs::metadata(path)?.is_file() {
            return Err(Error::new(ErrorKind::InvalidInput, "not a regular file"));
        }
        let file = File::open(path)?;
        let len = usize::try_from(file.metadata()?.len())
            .map_err(|_| Error::new(ErrorKind::FileTooLarge, "larger than the address space"))?;
        if len == 0 {
            return Ok(Self { map: None });
        }
        // SAFETY: the mapping is read-only and private to this value, and `len` is the file's length, taken from the
        // same open file. What remains is that nobody shortens or rewrites the file meanwhile, which the note on the
        // type asks of whoever owns the model files.
        let map = unsafe { memmap2::MmapOptions::new().len(len).map(&file) }?;
        Ok(Self { map: Some(map) })
    }

    /// The file's bytes, as long as the file was when it was opened.
    pub fn bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or(&[])
    }

    /// Asks the system to read `range` ahead. A hint: nothing fails if it is not taken.
    pub fn prefetch(&self, range: Range<usize>) {
        let range = self.clamped(range);
        if let Some(map) = &self.map
            && !range.is_empty()
        {
            let _ = map.advise_range(memmap2::Advice::WillNeed, range.start, range.len());
        }
    }

    /// Takes the whole pages inside `range` out of this process's memory; what is read again comes from the file again.
    ///
    /// Returns the bytes given back, at most two pages less than the range has. Pages that it shares with its
    /// neighbours stay.
    pub fn release(&self, range: Range<usize>) -> usize {
        let pages = whole_pages(self.clamped(range), page_size());
        let Some(map) = &self.map else { return 0 };
        if pages.is_empty() {
            return 0;
        }
        // SAFETY: the advice is dangerous only where dropping a page loses its content. This mapping is backed by a
        // file and was never written to, so a dropped page is read from the file again with the same bytes. The range
        // lies inside the mapping (`clamped`).
        match unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, pages.start, pages.len()) } {
            Ok(()) => pages.len(),
            Err(_) => 0,
        }
    }

    fn clamped(&self, range: Range<usize>) -> Range<usize> {
        let end = range.end.min(self.bytes().len());
        range.start.min(end)..end
    }
}

/// The largest run of whole pages inside `range`, empty where there is none.
fn whole_pages(range: Range<usize>, page: usize) -> Range<usize> {
    let start = range.start.next_multiple_of(page);
    start..(range.end / page * page).max(start)
}

fn page_size() -> usize {
    // SAFETY: `sysconf` with this name reads a constant of the system and has no precondition.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).expect("the page size is positive on every system with mappings")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn temp_file(name: &str, bytes: &[u8]) -> std::path::PathBuf {
        let path = std::env::temp_dir().join(format!("arc-map-{}-{name}", std::process::id()));
        std::fs::write(&path, bytes).expect("the temporary folder can be written");
        path
    }

    /// KiB of this process's mapping of `path` that are in memory.
    fn resident_kib(path: &Path) -> usize {
        let smaps = std::fs::read_to_string("/proc/self/smaps").expect("Linux");
        let mapping = smaps.split(path.to_str().expect("an ASCII path")).nth(1).expect("the file is mapped");
        let line = mapping.lines().find(|line| line.starts_with("Rss:")).expect("a resident size");
        line.split_whitespace().nth(1).expect("a number").parse().expect("a number")
    }

    #[test]
    fn releasing_gives_pages_back_and_keeps_the_content() {
        let bytes = (0..1 << 20).map(|i: u32| (i / 7) as u8).collect::<Vec<_>>();
        let path = temp_file("release", &bytes);
        let map = Mapped::open(&path).expect("it opens");
        assert_eq!(map.bytes(), bytes);
        assert_eq!(resident_kib(&path), 1024);
        assert_eq!(map.release(100..bytes.len() - 100), bytes.len() - 2 * page_size());
        assert_eq!(resident_kib(&path), 2 * page_size() / 1024);
        map.prefetch(0..usize::MAX);
        assert_eq!(map.bytes(), bytes);
        std::fs::remove_file(path).expect("it was there");
    }

    #[test]
    fn ranges_outside_the_file_are_cut() {
        let path = temp_file("cut", &[1, 2, 3]);
        let map = Mapped::open(&path).expect("it opens");
        map.prefetch(7..9);
        assert_eq!(map.release(0..usize::MAX), 0);
        assert_eq!(map.release(9..12), 0);
        std::fs::remove_file(path).expect("it was there");
    }

    #[test]
    fn an_empty_file_has_no_bytes_and_a_folder_is_refused() {
        let path = temp_file("empty", &[]);
        let map = Mapped::open(&path).expect("it opens");
        assert!(map.bytes().is_empty());
        assert_eq!(map.release(0..10), 0);
        std::fs::remove_file(path).expect("it was there");
        let error = Mapped::open(&std::env::temp_dir()).expect_err("a folder is no file");
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
    }

    #[test]
    fn whole_pages_never_reach_outside_the_range() {
        assert_eq!(whole_pages(0..4096, 4096), 0..4096);
        assert_eq!(whole_pages(1..8192, 4096), 4096..8192);
        assert!(whole_pages(1..4095, 4096).is_empty());
        assert!(whole_pages(4097..8191, 4096).is_empty());
    }
}
