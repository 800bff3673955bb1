//! The CPU device.

pub(crate) mod buf;
pub(crate) mod team;
