//! What people write: configuration and manifests.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vipgate_dataplane::snapshot::build::Builder;

use super::network;
use super::xds::seen;
use crate::complaint::{Complaint, Complaints};
use crate::config::{Config, PolicydConfig};
use crate::manifest::{Foreign, Manifests, Object, read};
use crate::policy::{Deal, Viewer, compile};
use crate::xds::book::{Book, Held};
use crate::xds::resource::{Content, encode_all, settings, version_of};
use crate::yaml::{self, MOST_REPEATED, Node, REPEATED_BYTES, Source, Value};

/// What a text may take, even on a busy machine and without optimization.
const LONGEST: Duration = Duration::from_secs(20);

/// Any text as `gateway.yaml` and as `policyd.yaml`.
pub fn config(data: &[u8]) {
    let begun = Instant::now();
    let Ok(text) = std::str::from_utf8(data) else { return };
    let (trees, has_faults) = bounded(text);
    let gateway = Config::parse("c.yaml", text);
    let policyd = PolicydConfig::parse("c.yaml", text);
    check_places(text, gateway.as_ref().err());
    check_places(text, policyd.as_ref().err());
    // JSON is YAML: the same tree written otherwise means the same.
    if let [tree] = trees.as_slice()
        && !has_faults
        && let Some(json) = json(tree)
    {
        let json = json.to_string();
        assert_eq!(Config::parse("c.yaml", &json).ok(), gateway.ok(), "{json}");
        assert_eq!(PolicydConfig::parse("c.yaml", &json).ok(), policyd.ok(), "{json}");
    }
    assert!(begun.elapsed() < LONGEST, "{:?}", begun.elapsed());
}

/// Any text as manifests, and all the way to the policy that workers would have of it.
pub fn manifests(data: &[u8]) {
    let begun = Instant::now();
    let Ok(text) = std::str::from_utf8(data) else { return };
    bounded(text);
    let mut manifests = Manifests::default();
    read(&Arc::new(Source::new("m.yaml", text.to_owned())), Foreign::Refuse, &mut manifests);
    let compiled = compile(&manifests.objects);
    let complaints = Complaints([manifests.complaints, compiled.complaints].concat());
    check_places(text, Some(&complaints));
    let mut reversed: Vec<&Object> = manifests.objects.iter().collect();
    reversed.reverse();
    let again = compile(reversed);
    let is_plain = !complaints.0.iter().any(Complaint::is_error);
    if is_plain {
        assert_eq!(version_of(&again.deal), version_of(&compiled.deal), "the order of objects doesn't matter");
        in_force(&compiled.deal);
    }
    assert!(begun.elapsed() < LONGEST, "{:?}", begun.elapsed());
}

/// What the compiler makes of manifests that are fine, gateways must take: from files, and by way of a server.
fn in_force(deal: &Deal) {
    let viewer = Viewer::named("gw-1");
    let version = version_of(deal);
    let set = deal.part_of(Some(&viewer), &version);
    let from_files = Builder::new(network()).with_policy(&set).map(|snapshot| seen(&snapshot.policy));
    let mut book = Book::default();
    let resources = encode_all(deal);
    let sum = resources.iter().fold(0_u64, |sum, (_, content)| sum.wrapping_add(content.version));
    let (key, content, named) = settings(deal.counts(), sum);
    assert_eq!(named, version);
    let held = |content: Content| Held { version: Content::version_text(content.version), body: content.body };
    let all = resources.into_iter().chain([(key, content)]).map(|(key, content)| (key, held(content)));
    assert_eq!(book.stage_held(all.collect()), Ok(()), "what a server says can be read");
    assert!(book.is_whole());
    let by_server = Builder::new(network()).with_change(&book.offer(&viewer).change);
    let by_server = by_server.map(|snapshot| seen(&snapshot.policy));
    assert_eq!(by_server.map_err(|error| error.to_string()), from_files.map_err(|error| error.to_string()));
}

/// The trees of a text, and whether something in it is no YAML: never more than it says and aliases may repeat.
fn bounded(text: &str) -> (Vec<Node>, bool) {
    let (trees, faults) = yaml::read(text);
    let (mut values, mut bytes) = (0, 0);
    for tree in &trees {
        count(tree, &mut values, &mut bytes);
    }
    assert!(values <= text.len() + MOST_REPEATED + 1, "{values} values of {} bytes", text.len());
    assert!(bytes <= 2 * text.len() + REPEATED_BYTES, "{bytes} bytes of values of {} bytes", text.len());
    let lines = lines(text);
    assert!(faults.iter().all(|fault| fault.at.line <= lines), "{faults:?}");
    (trees, !faults.is_empty())
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

/// Lines as any version of YAML counts them, and one to begin with.
fn lines(text: &str) -> u32 {
    text.split(['\n', '\r', '\u{85}', '\u{2028}', '\u{2029}']).count() as u32 + 1
}

/// Whatever is wrong is said of a place that there is.
fn check_places(text: &str, complaints: Option<&Complaints>) {
    let lines = lines(text);
    for complaint in complaints.iter().flat_map(|all| &all.0) {
        assert!(complaint.line <= lines, "{complaint}");
        assert!(!complaint.reason.is_empty(), "{complaint:?}");
    }
}

/// A tree as JSON; none of what JSON has no form for.
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
