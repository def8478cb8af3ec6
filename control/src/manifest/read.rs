//! Documents to objects.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::de::DeserializeOwned;

use super::files::walk;
use super::vipgate::{Document, Verify};
use super::{AddressPool, Body, EgressPolicy, Gateway, Kind, Object, ObjectId, Origin};
use crate::complaint::{Complaint, Place, Severity};
use crate::yaml::{Fault, Node, Source, Value, decode, join};

/// What to make of a kind that means nothing to vipgate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Foreign {
    /// It is an error.
    Refuse,
    /// It is left out, with a warning.
    Ignore,
}

/// Objects and what is wrong with the files that they are in.
#[derive(Debug, Default)]
pub struct Manifests {
    /// The objects that could be read, in the order of the files.
    pub objects: Vec<Object>,
    /// What is wrong.
    pub complaints: Vec<Complaint>,
}

/// Reads files and directories; see [`walk`] for which files.
pub fn load(paths: &[PathBuf], foreign: Foreign) -> Manifests {
    let found = walk(paths);
    let mut manifests = Manifests::default();
    for (path, error) in found.failures {
        manifests.complaints.push(unreadable(&path, &error));
    }
    for path in found.files {
        match std::fs::read_to_string(&path) {
            Ok(text) => read(&Arc::new(Source::new(&path.display().to_string(), text)), foreign, &mut manifests),
            Err(error) => manifests.complaints.push(unreadable(&path, &error)),
        }
    }
    manifests
}

fn unreadable(path: &Path, error: &std::io::Error) -> Complaint {
    Complaint::about_file(&path.display().to_string(), format!("can't be read: {error}"))
}

/// Reads the documents of one text.
pub fn read(source: &Arc<Source>, foreign: Foreign, into: &mut Manifests) {
    let (nodes, complaints) = source.documents();
    into.complaints.extend(complaints);
    for (document, node) in nodes.iter().enumerate() {
        let list = match (node.text("kind"), node.get("items").map(|items| &items.value)) {
            (Some(kind), Some(Value::List(items))) => kind.strip_suffix("List").map(|of| (of, items)),
            _ => None,
        };
        let mut reader = Reader { source, document, foreign, into };
        match list {
            None => reader.object(node, None, None),
            // `kubectl` prints `List`, whose items say what they are; the API prints `ServiceList`, whose items don't.
            Some((of, items)) => {
                let version = node.text("apiVersion").unwrap_or_default();
                for (item, node) in items.iter().enumerate() {
                    reader.object(node, Some(item), Some((version, of)));
                }
            }
        }
    }
}

struct Reader<'a> {
    source: &'a Arc<Source>,
    document: usize,
    foreign: Foreign,
    into: &'a mut Manifests,
}

impl Reader<'_> {
    fn object(&mut self, node: &Node, item: Option<usize>, of: Option<(&str, &str)>) {
        let mut faults = Vec::new();
        match kind(node, of) {
            Ok(Some(kind)) => {
                if let Some((id, body)) = object(kind, node, &mut faults) {
                    let origin =
                        Origin { source: self.source.clone(), document: self.document, item, line: node.at.line };
                    self.into.objects.push(Object { id, origin, body });
                }
            }
            // What our kinds look like, not what they say: people keep it beside their manifests.
            Ok(None) if is_our_definition(node) => {}
            Ok(None) => {
                let kind = node.text("kind").unwrap_or_default();
                let (severity, what) = match self.foreign {
                    Foreign::Refuse => (Severity::Error, "means nothing to vipgate"),
                    Foreign::Ignore => (Severity::Warning, "means nothing to vipgate and is ignored"),
                };
                let known = Kind::ALL.map(Kind::as_str).join(", ");
                let fault = at(node, "kind", format!("`{kind}` {what}; known are {known}"));
                self.complain(fault, item, severity);
            }
            Err(fault) => faults.push(fault),
        }
        for fault in faults {
            self.complain(fault, item, Severity::Error);
        }
    }

    fn complain(&mut self, mut fault: Fault, item: Option<usize>, severity: Severity) {
        if let Some(item) = item {
            fault.field = join(&format!("items[{item}]"), &fault.field);
        }
        let object = Some(Place { source: self.source.id(), document: self.document, item });
        self.into.complaints.push(Complaint { severity, object, ..self.source.complaint(fault) });
    }
}

/// The kind of a document; none if it is one of somebody else's.
fn kind(node: &Node, of: Option<(&str, &str)>) -> Result<Option<Kind>, Fault> {
    if !matches!(node.value, Value::Map(_)) {
        return Err(at(node, "", "is no object: expected a map with apiVersion, kind, metadata and spec".into()));
    }
    let of = of.filter(|(_, kind)| !kind.is_empty());
    let given = |field: &str, default: Option<&str>| match (node.text(field), default) {
        (Some(text), _) => Ok(text.to_owned()),
        (None, Some(default)) if node.get(field).is_none() => Ok(default.to_owned()),
        _ => Err(at(node, field, "is missing".into())),
    };
    let name = given("kind", of.map(|(_, kind)| kind))?;
    let version = given("apiVersion", of.map(|(version, _)| version))?;
    let Some(kind) = Kind::ALL.into_iter().find(|kind| kind.as_str() == name) else {
        return Ok(None);
    };
    if version == kind.api_version() {
        return Ok(Some(kind));
    }
    // Others have kinds of these names too: `Gateway` of gateway.networking.k8s.io is none of ours.
    let group = |version: &str| version.split_once('/').map(|(group, _)| group.to_owned());
    if group(&version) != group(kind.api_version()) {
        return Ok(None);
    }
    Err(at(node, "apiVersion", format!("`{version}` of {name} is not known, only {}", kind.api_version())))
}

/// Whether a document is the CustomResourceDefinition of one of our kinds.
fn is_our_definition(node: &Node) -> bool {
    let group = node.get("spec").and_then(|spec| spec.text("group"));
    node.text("kind") == Some("CustomResourceDefinition") && group == Some("vipgate.io")
}

fn at(node: &Node, field: &str, reason: String) -> Fault {
    Fault { at: node.locate(field), field: field.to_owned(), reason }
}

/// An object of a known kind. What is wrong is added to `faults`; an object that could not be read at all is none.
fn object(kind: Kind, node: &Node, faults: &mut Vec<Fault>) -> Option<(ObjectId, Body)> {
    let body = match kind {
        Kind::EndpointSlice => typed(node).map(|object| Body::EndpointSlice(Box::new(object))),
        Kind::Namespace => typed(node).map(|object| Body::Namespace(Box::new(object))),
        Kind::Node => typed(node).map(|object| Body::Node(Box::new(object))),
        Kind::Pod => typed(node).map(|object| Body::Pod(Box::new(object))),
        Kind::Service => typed(node).map(|object| Body::Service(Box::new(object))),
        Kind::AddressPool => {
            own(node, faults).map(|(metadata, spec)| Body::AddressPool(Box::new(AddressPool { metadata, spec })))
        }
        Kind::EgressPolicy => {
            own(node, faults).map(|(metadata, spec)| Body::EgressPolicy(Box::new(EgressPolicy { metadata, spec })))
        }
        Kind::Gateway => own(node, faults).map(|(metadata, spec)| Body::Gateway(Box::new(Gateway { metadata, spec }))),
    };
    match body {
        Ok(body) => Some((id(kind, node, body.meta(), faults)?, body)),
        Err(fault) => {
            faults.push(fault);
            None
        }
    }
}

fn typed<T: DeserializeOwned>(node: &Node) -> Result<T, Fault> {
    decode(node)
}

fn own<S: DeserializeOwned + Verify>(node: &Node, faults: &mut Vec<Fault>) -> Result<(ObjectMeta, S), Fault> {
    let document: Document<S> = decode(node)?;
    document.spec.verify(&mut |field, reason| faults.push(at(node, field, reason)));
    Ok((document.metadata, document.spec))
}

fn id(kind: Kind, node: &Node, meta: &ObjectMeta, faults: &mut Vec<Fault>) -> Option<ObjectId> {
    let Some(name) = meta.name.clone().filter(|name| !name.is_empty()) else {
        faults.push(at(node, "metadata.name", "is missing".into()));
        return None;
    };
    let namespace = match (&meta.namespace, kind.is_namespaced()) {
        // As `kubectl apply` takes it.
        (None, true) => "default".to_owned(),
        (Some(namespace), true) => namespace.clone(),
        (None, false) => String::new(),
        (Some(_), false) => {
            faults.push(at(node, "metadata.namespace", format!("{} objects are in no namespace", kind.as_str())));
            String::new()
        }
    };
    Some(ObjectId { kind, namespace, name })
}
