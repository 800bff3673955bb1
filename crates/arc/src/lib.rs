//! Text, HTTP, JSON and flags: everything around the engine that speaks to people and programs.
#![forbid(unsafe_code)]

pub mod answer;
pub mod config;
pub mod model_text;
pub mod open;
pub mod pull;
pub mod serve;
pub mod structured;
pub mod text;
