//! Documents to objects.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{self, Namespace, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::de::DeserializeOwned;

use super::files::walk;
use super::vipgate::{Document, Verify};
use super::{
    AddressPool, Body, DEFAULT_NAMESPACE, EgressPolicy, Gateway, Kind, Object, ObjectId, Origin, OverlayNode, pod,
    service, slice,
};
use crate::complaint::{Complaint, Place, Severity};
use crate::text_file::named_text;
use crate::yaml::{Fault, Node, Position, Source, Value, decode, join};

/// The API group of vipgate's own kinds.
const OUR_GROUP: &str = "vipgate.io";

/// What to make of a kind that means nothing to vipgate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Foreign {
    /// It is an error.
    Refuse,
    /// It is left out, with a warning.
    Ignore,
    /// It is left out, with one warning for each kind of a document; one of `vipgate.io` that isn't known is misspelt, and an error.
    IgnoreOthers,
}

/// Takes what is wrong with one object: how bad it is, the field, whose path starts at the object, and the reason.
pub(super) type Report<'a> = dyn FnMut(Severity, &str, String) + 'a;

/// Objects and what is wrong with the files that they are in.
#[derive(Debug, Default)]
pub struct Manifests {
    /// The objects that could be read, in the order of the files.
    pub objects: Vec<Object>,
    /// What is wrong.
    pub complaints: Vec<Complaint>,
    /// Objects that could not be read, as far as they could be named.
    pub broken: Vec<(Place, ObjectId)>,
    /// How many documents there are, of whatever kind.
    pub documents: usize,
}

/// Reads files and directories; see [`walk`] for which files.
pub fn load(paths: &[PathBuf], foreign: Foreign) -> Manifests {
    let found = walk(paths);
    let mut manifests = Manifests::default();
    for (path, error) in found.failures {
        manifests.complaints.push(unreadable(&path, &error));
    }
    for path in found.files {
        match named_text(&path) {
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
    into.documents += nodes.len();
    for (document, node) in nodes.iter().enumerate() {
        let list = match (node.text("kind"), items(node)) {
            (Some(kind), Some(Value::List(items))) => kind.strip_suffix("List").map(|of| (of, items)),
            _ => None,
        };
        let mut reader = Reader { source, document, foreign, foreign_kinds: BTreeSet::new(), into };
        match list {
            // `kubectl` prints the kind of a List behind its items.
            None if node.get("kind").is_none() && matches!(items(node), Some(Value::List(_))) => {
                let line = u32::try_from(source.text().lines().count()).unwrap_or(u32::MAX);
                let reason = format!(
                    "is missing: the document looks cut short at line {line}, since a List has its kind behind its items"
                );
                let fault = Fault { at: Position { line, column: 1 }, field: "kind".to_owned(), reason };
                reader.complain(fault, None, Severity::Error);
            }
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

/// The items of a list.
fn items(node: &Node) -> Option<&Value> {
    node.get("items").map(|items| &items.value)
}

struct Reader<'a> {
    source: &'a Arc<Source>,
    document: usize,
    foreign: Foreign,
    /// Kinds that mean nothing to vipgate and were complained about.
    foreign_kinds: BTreeSet<String>,
    into: &'a mut Manifests,
}

impl Reader<'_> {
    fn object(&mut self, node: &Node, item: Option<usize>, of: Option<(&str, &str)>) {
        let mut faults = Vec::new();
        let place = Place { source: self.source.id(), document: self.document, item };
        match kind(node, of) {
            Ok(Some(kind)) => {
                let read = object(kind, node, &mut faults);
                if read.is_none() {
                    self.into.broken.extend(named(kind, node).map(|id| (place, id)));
                }
                if let Some((id, body)) = read {
                    let origin =
                        Origin { source: self.source.clone(), document: self.document, item, line: node.at.line };
                    let name = id.to_string().into();
                    self.into.objects.push(Object { id, name, origin, body });
                }
            }
            // What our kinds look like, not what they say: people keep it beside their manifests.
            Ok(None) if is_our_definition(node) => {}
            // As the first bytes of a List say that end in `kind: Lis`: nobody knows what else it had.
            Ok(None) if matches!(node.get("items").map(|items| &items.value), Some(Value::List(_))) => {
                let kind = node.text("kind").unwrap_or_default();
                faults.push((
                    Severity::Error,
                    at(node, "kind", format!("`{kind}` is no List, but has items: is it cut?")),
                ));
            }
            Ok(None) => {
                let kind = node.text("kind").unwrap_or_default();
                let is_ours = group_of(node, of) == Some(OUR_GROUP);
                let (severity, what) = match self.foreign {
                    Foreign::IgnoreOthers if !is_ours && !self.foreign_kinds.insert(kind.to_owned()) => return,
                    Foreign::IgnoreOthers if is_ours => (Severity::Error, "means nothing to vipgate"),
                    Foreign::Refuse => (Severity::Error, "means nothing to vipgate"),
                    Foreign::Ignore | Foreign::IgnoreOthers => {
                        (Severity::Warning, "means nothing to vipgate and is ignored")
                    }
                };
                let known = Kind::ALL.map(Kind::as_str).join(", ");
                let fault = at(node, "kind", format!("`{kind}` {what}; known are {known}"));
                self.complain(fault, item, severity);
            }
            Err(fault) => {
                let kind = Kind::ALL.into_iter().find(|kind| node.text("kind") == Some(kind.as_str()));
                self.into.broken.extend(kind.and_then(|kind| named(kind, node)).map(|id| (place, id)));
                faults.push((Severity::Error, fault));
            }
        }
        for (severity, fault) in faults {
            self.complain(fault, item, severity);
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

/// The API group of a document, or of the list that it is in.
fn group_of<'a>(node: &'a Node, of: Option<(&'a str, &'a str)>) -> Option<&'a str> {
    let version = node.text("apiVersion").or(of.map(|(version, _)| version))?;
    version.split_once('/').map(|(group, _)| group)
}

/// Whether a document is the CustomResourceDefinition of one of our kinds.
fn is_our_definition(node: &Node) -> bool {
    let group = node.get("spec").and_then(|spec| spec.text("group"));
    node.text("kind") == Some("CustomResourceDefinition") && group == Some(OUR_GROUP)
}

fn at(node: &Node, field: &str, reason: String) -> Fault {
    Fault { at: node.locate(field), field: field.to_owned(), reason }
}

/// What is wrong with an object, and how bad that is.
type Faults = Vec<(Severity, Fault)>;

/// What metadata says of an object's name.
struct Named {
    name: Option<String>,
    namespace: Option<String>,
}

impl Named {
    fn by(metadata: &ObjectMeta) -> Self {
        Self { name: metadata.name.clone(), namespace: metadata.namespace.clone() }
    }
}

/// An object of a known kind. What is wrong is added to `faults`; an object that could not be read at all is none.
fn object(kind: Kind, node: &Node, faults: &mut Faults) -> Option<(ObjectId, Body)> {
    match body(kind, node, faults) {
        Ok((named, body)) => Some((id(kind, node, named, faults)?, body)),
        Err(fault) => {
            faults.push((Severity::Error, fault));
            None
        }
    }
}

fn body(kind: Kind, node: &Node, faults: &mut Faults) -> Result<(Named, Body), Fault> {
    let report = &mut |severity, field: &str, reason| faults.push((severity, at(node, field, reason)));
    Ok(match kind {
        Kind::EndpointSlice => {
            let document: EndpointSlice = decode(node)?;
            (Named::by(&document.metadata), Body::EndpointSlice(Box::new(slice::read(document, report))))
        }
        Kind::Namespace => {
            let document: Namespace = decode(node)?;
            (Named::by(&document.metadata), Body::Namespace(Box::new(document)))
        }
        Kind::Node => {
            let document: v1::Node = decode(node)?;
            (Named::by(&document.metadata), Body::Node(Box::new(document)))
        }
        Kind::Pod => {
            let document: Pod = decode(node)?;
            (Named::by(&document.metadata), Body::Pod(Box::new(pod::read(document, report))))
        }
        Kind::Service => {
            let document: Service = decode(node)?;
            (Named::by(&document.metadata), Body::Service(Box::new(service::read(&document, report))))
        }
        Kind::AddressPool => {
            let (metadata, spec) = own(node, report)?;
            (Named::by(&metadata), Body::AddressPool(Box::new(AddressPool { metadata, spec })))
        }
        Kind::EgressPolicy => {
            let (metadata, spec) = own(node, report)?;
            (Named::by(&metadata), Body::EgressPolicy(Box::new(EgressPolicy { metadata, spec })))
        }
        Kind::Gateway => {
            let (metadata, spec) = own(node, report)?;
            (Named::by(&metadata), Body::Gateway(Box::new(Gateway { metadata, spec })))
        }
        Kind::OverlayNode => {
            let (metadata, spec) = own(node, report)?;
            (Named::by(&metadata), Body::OverlayNode(Box::new(OverlayNode { metadata, spec })))
        }
    })
}

fn own<S: DeserializeOwned + Verify>(node: &Node, report: &mut Report<'_>) -> Result<(ObjectMeta, S), Fault> {
    let document: Document<S> = decode(node)?;
    document.spec.verify(&mut |field, reason| report(Severity::Error, field, reason));
    Ok((document.metadata, document.spec))
}

/// The name of an object that can't be read, as far as it is plain.
fn named(kind: Kind, node: &Node) -> Option<ObjectId> {
    let metadata = node.get("metadata")?;
    let name = metadata.text("name")?.to_owned();
    let namespace = match (metadata.text("namespace"), kind.is_namespaced()) {
        (_, false) => String::new(),
        (None, true) => DEFAULT_NAMESPACE.to_owned(),
        (Some(namespace), true) => namespace.to_owned(),
    };
    Some(ObjectId { kind, namespace, name })
}

fn id(kind: Kind, node: &Node, named: Named, faults: &mut Faults) -> Option<ObjectId> {
    let mut fault = |field, reason| faults.push((Severity::Error, at(node, field, reason)));
    let Some(name) = named.name.filter(|name| !name.is_empty()) else {
        fault("metadata.name", "is missing".into());
        return None;
    };
    let namespace = match (named.namespace, kind.is_namespaced()) {
        // As `kubectl apply` takes it.
        (None, true) => DEFAULT_NAMESPACE.to_owned(),
        (Some(namespace), true) => namespace,
        (None, false) => String::new(),
        (Some(_), false) => {
            fault("metadata.namespace", format!("{} objects are in no namespace", kind.as_str()));
            String::new()
        }
    };
    Some(ObjectId { kind, namespace, name })
}
