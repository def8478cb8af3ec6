//! Field paths: `spec.selectors[0].podSelector`, `metadata.annotations[vipgate.io/egress]`.

use super::{Node, Position, Value};

/// A key as a step of a path: in brackets if it contains separators.
pub fn key_step(key: &str) -> String {
    if key.is_empty() || key.contains(['.', '[', ']', '/']) { format!("[{key}]") } else { key.to_owned() }
}

/// Joins paths: `join("spec", "[0].x")` is `spec[0].x`, `join("spec", "x")` is `spec.x`.
pub fn join(above: &str, below: &str) -> String {
    match (above.is_empty(), below.is_empty()) {
        (true, _) => below.to_owned(),
        (_, true) => above.to_owned(),
        _ if below.starts_with('[') => format!("{above}{below}"),
        _ => format!("{above}.{below}"),
    }
}

/// The position of a path, or of its last step that exists.
pub(super) fn locate(root: &Node, path: &str) -> Position {
    let mut node = root;
    let mut position = root.position;
    for step in steps(path) {
        let next = match &node.value {
            Value::Map(entries) => entries.iter().find(|e| e.key == step).map(|e| (&e.node, e.key_position)),
            Value::List(items) => step.parse::<usize>().ok().and_then(|i| items.get(i)).map(|n| (n, n.position)),
            _ => None,
        };
        let Some((found, found_at)) = next else { break };
        (node, position) = (found, found_at);
    }
    position
}

fn steps(path: &str) -> impl Iterator<Item = &str> {
    let mut rest = path;
    std::iter::from_fn(move || {
        rest = rest.strip_prefix('.').unwrap_or(rest);
        if rest.is_empty() {
            return None;
        }
        let (step, after) = match rest.strip_prefix('[') {
            Some(inner) => inner.split_once(']').unwrap_or((inner, "")),
            None => rest.split_at(rest.find(['.', '[']).unwrap_or(rest.len())),
        };
        rest = after;
        Some(step)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_joined_path_splits_into_its_steps() {
        let path = join(&join("metadata.annotations", &key_step("vipgate.io/egress")), "[3].x");
        assert_eq!(path, "metadata.annotations[vipgate.io/egress][3].x");
        assert_eq!(steps(&path).collect::<Vec<_>>(), ["metadata", "annotations", "vipgate.io/egress", "3", "x"]);
        assert_eq!(steps("").count(), 0);
    }

    #[test]
    fn a_path_is_located_at_its_last_step_that_exists() {
        let (nodes, faults) = super::super::read("a:\n  b:\n  - x\n  - {c: 1}\n");
        assert_eq!(faults, []);
        let line = |path| locate(&nodes[0], path).line;
        assert_eq!(
            (line("a"), line("a.b"), line("a.b[1]"), line("a.b[1].c"), line("a.b[7]"), line("zzz")),
            (1, 2, 4, 4, 2, 1)
        );
    }
}
