//! The file with the numbers of gateways in marks: a line for each, number and name.

use std::io;
use std::path::Path;
use std::sync::Arc;

use vipgate_node::indices::Indices;
use vipgate_node::marks::GatewayIndex;

use crate::replaced_file::Format;

pub(super) const FORMAT: Format = Format { name: "node marks", version: 1, mode: 0o644 };

/// Reads the file. Without one, or if it is refused, connections find other gateways.
pub(super) fn read(path: &Path) -> Indices {
    let content = FORMAT.read(path).and_then(|content| content.map_err(io::Error::other));
    let content = content.unwrap_or_else(|error| {
        if error.kind() != io::ErrorKind::NotFound {
            let (file, error) = (path.display().to_string(), error.to_string());
            tracing::error!(event = "marks_not_stored", file, error, "not used: gateways may have other marks");
        }
        Vec::new()
    });
    let entry = |line: &str| {
        let (number, name) = line.split_once(' ')?;
        Some((Arc::from(name), GatewayIndex(number.parse().ok().filter(|number| *number > 0)?)))
    };
    Indices::restored(String::from_utf8_lossy(&content).lines().filter_map(entry))
}

/// Replaces the file.
pub(super) fn write(path: &Path, indices: &Indices) {
    let lines: Vec<String> = indices.iter().map(|(name, index)| format!("{} {name}\n", index.0)).collect();
    if let Err(error) = FORMAT.write(path, lines.concat().as_bytes()) {
        let (file, error) = (path.display().to_string(), error.to_string());
        tracing::error!(event = "marks_not_stored", file, error, "after a restart, gateways may have other marks");
    }
}
