//! What ended sequences left in their slots. A prompt that begins with what one of them ran goes on from there: of a conversation that
//! grows, only what is new is run. Its tokens are the same, since a row's bits do not depend on the step that it ran in.
//!
//! A slot and its blocks are kept as they are until somebody needs them, the oldest first, so that keeping them costs nothing.

use crate::scheduler::Want;

/// What of a kept sequence may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prefixes {
    /// Nothing.
    Off,
    /// All of it or nothing: the slot has what the next position needs, and no earlier one.
    Whole,
    /// As many of its first tokens as are in the prompt.
    Any,
}

/// What one sequence left.
#[derive(Debug)]
pub(super) struct Left {
    pub slot: u16,
    /// Blocks of `tokens`, in position order.
    pub blocks: Vec<u32>,
    /// Tokens whose rows are there.
    pub tokens: Vec<u32>,
    /// Whether a drafter has seen them too.
    pub speculated: bool,
}

/// The oldest first.
#[derive(Debug, Default)]
pub(super) struct Kept {
    left: Vec<Left>,
    blocks: usize,
}

impl Kept {
    pub fn push(&mut self, left: Left) {
        self.blocks += left.blocks.len();
        self.left.push(left);
    }

    /// Takes out the oldest.
    pub fn pop(&mut self) -> Option<Left> {
        (!self.left.is_empty()).then(|| self.remove(0))
    }

    /// Takes out what most of a prompt can begin with, and how many of its tokens. Of a longer one with little in common nothing is
    /// taken, since its own conversation may go on, unless there is no other `full` slot.
    pub fn take(&mut self, want: &Want, prefixes: Prefixes, full: bool) -> Option<(Left, u32)> {
        let usable = |left: &Left| {
            // The last token's row is what draws.
            let most = want.prompt.len() - 1;
            let common = left.tokens.iter().zip(&want.prompt[..most]).take_while(|(a, b)| a == b).count();
            match prefixes {
                Prefixes::Whole if common < left.tokens.len() => 0,
                _ if !full && 2 * common < left.tokens.len() => 0,
                _ => common,
            }
        };
        if prefixes == Prefixes::Off || want.score || want.depth > 0 {
            return None;
        }
        let fits = |left: &Left| left.speculated || !want.speculates;
        let of = self.left.iter().enumerate().filter(|(_, left)| fits(left)).map(|(at, left)| (usable(left), at));
        // The newest of equals.
        let (common, at) = of.max().filter(|&(common, _)| common > 0)?;
        Some((self.remove(at), common as u32))
    }

    /// Blocks of all of them.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    pub fn is_empty(&self) -> bool {
        self.left.is_empty()
    }

    fn remove(&mut self, at: usize) -> Left {
        let left = self.left.remove(at);
        self.blocks -= left.blocks.len();
        left
    }
}
