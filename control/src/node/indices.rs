//! The file with the numbers of gateways in marks: a line for each, number and name.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use vipgate_node::indices::Indices;
use vipgate_node::marks::GatewayIndex;

use crate::replaced_file::replace;

/// Reads the file; lines that aren't understood are ignored: connections of those gateways find another one.
pub(super) fn read(path: &Path) -> Indices {
    let text = fs::read_to_string(path).unwrap_or_default();
    let entry = |line: &str| {
        let (number, name) = line.split_once(' ')?;
        Some((Arc::from(name), GatewayIndex(number.parse().ok().filter(|number| *number > 0)?)))
    };
    Indices::restored(text.lines().filter_map(entry))
}

/// Replaces the file.
pub(super) fn write(path: &Path, indices: &Indices) {
    let lines: Vec<String> = indices.iter().map(|(name, index)| format!("{} {name}\n", index.0)).collect();
    let text = lines.concat();
    if let Err(error) = replace(path, 0o644, &[text.as_bytes()]) {
        let (file, error) = (path.display().to_string(), error.to_string());
        tracing::error!(event = "marks_not_stored", file, error, "after a restart, gateways may have other marks");
    }
}
