//! `arc flags`.

use std::{
    io::{self, Write},
    process::ExitCode,
};

use anyhow::Result;
use arc::config::{Config, Resolved, SETTINGS};

pub fn run(resolved: &Resolved) -> Result<ExitCode> {
    let defaults = Config::default();
    let shown = |config: &Config, name| config.show(name).expect("every listed setting can be shown");
    let rows = SETTINGS.iter().map(|s| {
        [
            s.name.to_owned(),
            s.kind.to_string(),
            shown(&defaults, s.name),
            shown(&resolved.config, s.name),
            resolved.source(s.name).to_string(),
            s.doc.trim().to_owned(),
        ]
    });
    let header = ["setting", "type", "default", "value", "from", "what it does"].map(str::to_owned);
    let rows: Vec<[String; 6]> = std::iter::once(header).chain(rows).collect();
    let width = |column: usize| rows.iter().map(|r| r[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..5).map(width).collect();
    let mut out = io::stdout().lock();
    for row in &rows {
        for (cell, width) in row.iter().zip(&widths) {
            write!(out, "{cell:<width$}  ")?;
        }
        writeln!(out, "{}", row[5])?;
    }
    writeln!(
        out,
        "\nA flag is --setting with - for _, a variable is ARC_SETTING; flags win over variables, over the file."
    )?;
    Ok(ExitCode::SUCCESS)
}
