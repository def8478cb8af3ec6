//! Fuzzing of YAML: configuration and manifests.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vipgate_dataplane::policy::build::Builder;
use vipgate_policy::compiler::{GatewayLocality, Placement, Tenancy, compile_for};
use vipgate_policy::diagnostic::{Diagnostic, Diagnostics};
use vipgate_policy::manifest::{Manifests, Object, UnsupportedKinds, read};
use vipgate_policy::yaml::{self, MAX_ALIAS_BYTES, MAX_ALIAS_VALUES, Node, Source, Value};

use super::network;
use crate::config::{Config, PolicydConfig};
use crate::xds::publication::Publication;
use crate::xds::resource::version_of;
use crate::xds::store::ResourceStore;

/// Time limit of one input, even on a busy machine and without optimization.
const TIME_LIMIT: Duration = Duration::from_secs(20);

/// Parses the input as `gateway.yaml` and as `policyd.yaml`.
pub fn config(data: &[u8]) {
    let start = Instant::now();
    let Ok(text) = std::str::from_utf8(data) else { return };
    let (trees, has_errors) = parse_bounded(text);
    let gateway = Config::parse("c.yaml", text);
    let policyd = PolicydConfig::parse("c.yaml", text);
    check_positions(text, gateway.as_ref().err());
    check_positions(text, policyd.as_ref().err());
    // JSON is YAML: the same tree as JSON has the same meaning.
    if let [tree] = trees.as_slice()
        && !has_errors
        && let Some(json) = json(tree)
    {
        let json = json.to_string();
        assert_eq!(Config::parse("c.yaml", &json).ok(), gateway.ok(), "{json}");
        assert_eq!(PolicydConfig::parse("c.yaml", &json).ok(), policyd.ok(), "{json}");
    }
    assert!(start.elapsed() < TIME_LIMIT, "{:?}", start.elapsed());
}

/// Parses the input as manifests, up to the compiled policy.
pub fn manifests(data: &[u8]) {
    let start = Instant::now();
    let Ok(text) = std::str::from_utf8(data) else { return };
    parse_bounded(text);
    let mut manifests = Manifests::default();
    read(&Arc::new(Source::new("m.yaml", text.to_owned())), UnsupportedKinds::Reject, &mut manifests);
    for tenancy in [Tenancy::Open, Tenancy::Strict] {
        compile_manifests(text, &manifests, tenancy);
    }
    assert!(start.elapsed() < TIME_LIMIT, "{:?}", start.elapsed());
}

/// Compiles manifests: in any order the same policy, which a gateway accepts.
fn compile_manifests(text: &str, manifests: &Manifests, tenancy: Tenancy) {
    let compiled = compile_for(tenancy, &manifests.objects);
    let diagnostics = Diagnostics([manifests.diagnostics.clone(), compiled.diagnostics].concat());
    check_positions(text, Some(&diagnostics));
    let mut reversed: Vec<&Object> = manifests.objects.iter().collect();
    reversed.reverse();
    let again = compile_for(tenancy, reversed);
    let is_valid = !diagnostics.0.iter().any(Diagnostic::is_error);
    if is_valid {
        assert_eq!(
            version_of(&again.placement),
            version_of(&compiled.placement),
            "the order of objects doesn't matter"
        );
        check_applicable(compiled.placement);
    }
}

/// A gateway must be able to decode the compiled policy of valid manifests, all of it; its engine takes or rejects it.
fn check_applicable(placement: Placement) {
    let version = version_of(&placement);
    let nothing = Publication::default();
    let publication = nothing.next(placement.into()).expect("the first one");
    assert_eq!((&publication.version, &publication.left_out), (&version, &BTreeMap::new()));
    let mut book = ResourceStore::default();
    assert_eq!(book.stage_resources(publication.stored(publication.changed_since(&nothing))), Ok(()));
    assert!(book.is_complete());
    let change = book.update_for(&GatewayLocality::named("gw-1")).change;
    if let Ok(snapshot) = Builder::new(network()).with_change(&change) {
        assert_eq!(snapshot.policy.version(), version);
    }
}

/// Parses YAML; returns the trees, and whether there were errors. Asserts that the size is bounded by the input and the
/// limit for aliases.
fn parse_bounded(text: &str) -> (Vec<Node>, bool) {
    let (trees, errors) = yaml::read(text);
    let (mut values, mut bytes) = (0, 0);
    for tree in &trees {
        count(tree, &mut values, &mut bytes);
    }
    assert!(values <= text.len() + MAX_ALIAS_VALUES + 1, "{values} values of {} bytes", text.len());
    assert!(bytes <= 2 * text.len() + MAX_ALIAS_BYTES, "{bytes} bytes of values of {} bytes", text.len());
    let lines = lines(text);
    assert!(errors.iter().all(|error| error.position.line <= lines), "{errors:?}");
    (trees, !errors.is_empty())
}

fn count(node: &Node, values: &mut usize, bytes: &mut usize) {
    *values += 1;
    match &node.value {
        Value::Text(text) => *bytes += text.len(),
        Value::List(items) => {
            for item in items {
                count(item, values, bytes);
            }
        }
        Value::Map(entries) => {
            for entry in entries {
                *bytes += entry.key.len();
                count(&entry.node, values, bytes);
            }
        }
        Value::Null | Value::Bool(_) | Value::Negative(_) | Value::Number(_) | Value::Float(_) => {}
    }
}

/// Upper limit of line numbers, for the line breaks of all YAML versions.
fn lines(text: &str) -> u32 {
    text.split(['\n', '\r', '\u{85}', '\u{2028}', '\u{2029}']).count() as u32 + 1
}

/// Every diagnostic has a reason, and a line that exists.
fn check_positions(text: &str, diagnostics: Option<&Diagnostics>) {
    let lines = lines(text);
    for diagnostic in diagnostics.iter().flat_map(|all| &all.0) {
        assert!(diagnostic.line <= lines, "{diagnostic}");
        assert!(!diagnostic.reason.is_empty(), "{diagnostic:?}");
    }
}

/// A tree as JSON; `None` if it contains values that JSON can't represent.
fn json(node: &Node) -> Option<serde_json::Value> {
    Some(match &node.value {
        Value::Null => serde_json::Value::Null,
        Value::Bool(it) => (*it).into(),
        Value::Negative(it) => (*it).into(),
        Value::Number(it) => (*it).into(),
        Value::Float(_) => return None,
        Value::Text(it) => it.as_str().into(),
        Value::List(items) => serde_json::Value::Array(items.iter().map(json).collect::<Option<_>>()?),
        Value::Map(entries) => {
            let pairs = entries.iter().map(|entry| Some((entry.key.clone(), json(&entry.node)?)));
            serde_json::Value::Object(pairs.collect::<Option<_>>()?)
        }
    })
}
