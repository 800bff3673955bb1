//! The memory table: what was allocated, under which name and with which lifetime.

/// The lifetime of a buffer, and its line in the memory table. There is no fourth.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MemoryClass {
    /// Parameters; written once at load.
    Weights,
    /// KV pools, rings, slots; sized from [`Limits`](crate::step::Limits).
    State,
    /// Scratch of a step, sized for the largest and reused by every layer.
    Workspace,
}

impl MemoryClass {
    /// Name for tables.
    pub fn name(self) -> &'static str {
        match self {
            MemoryClass::Weights => "weights",
            MemoryClass::State => "state",
            MemoryClass::Workspace => "workspace",
        }
    }
}

/// Lines of a name and a class, in the order in which they first appeared.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MemoryTable {
    lines: Vec<MemoryLine>,
}

/// Everything of one name and class.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryLine {
    /// What it is.
    pub name: String,
    /// How long it lives.
    pub class: MemoryClass,
    /// Bytes in all.
    pub bytes: u64,
    /// Buffers in all.
    pub count: u64,
}

impl MemoryTable {
    /// Notes an allocation.
    pub fn add(&mut self, name: &str, class: MemoryClass, bytes: u64) {
        match self.lines.iter_mut().find(|line| line.name == name && line.class == class) {
            Some(line) => {
                line.bytes = line.bytes.saturating_add(bytes);
                line.count += 1;
            }
            None => self.lines.push(MemoryLine { name: name.to_owned(), class, bytes, count: 1 }),
        }
    }

    /// Adds another table's lines.
    pub fn extend(&mut self, other: &MemoryTable) {
        other.lines.iter().for_each(|line| self.add(&line.name, line.class, line.bytes));
    }

    /// The lines.
    pub fn lines(&self) -> &[MemoryLine] {
        &self.lines
    }

    /// Bytes of a class.
    pub fn class_bytes(&self, class: MemoryClass) -> u64 {
        self.lines.iter().filter(|line| line.class == class).map(|line| line.bytes).fold(0, u64::saturating_add)
    }

    /// Bytes of everything.
    pub fn total_bytes(&self) -> u64 {
        self.lines.iter().map(|line| line.bytes).fold(0, u64::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use super::{MemoryClass, MemoryTable};

    #[test]
    fn lines_add_up_by_name_and_class() {
        let mut table = MemoryTable::default();
        table.add("kv cache", MemoryClass::State, 100);
        table.add("matrices", MemoryClass::Weights, 7);
        table.add("kv cache", MemoryClass::State, 50);
        table.add("kv cache", MemoryClass::Workspace, 1);
        assert_eq!(table.lines().len(), 3);
        assert_eq!((table.lines()[0].bytes, table.lines()[0].count), (150, 2));
        assert_eq!(table.class_bytes(MemoryClass::State), 150);
        assert_eq!(table.total_bytes(), 158);
        table.add("kv cache", MemoryClass::State, u64::MAX);
        assert_eq!(table.total_bytes(), u64::MAX, "a hostile size saturates");
    }
}
