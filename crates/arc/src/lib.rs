//! Text, HTTP, JSON and flags: everything around the engine that speaks to people and programs.
#![forbid(unsafe_code)]

pub mod config;
pub mod pull;
pub mod text;
