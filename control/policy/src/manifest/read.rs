//! Manifest reader: YAML documents to objects.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{self, Namespace, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::{
    AddressPool, AddressRecord, Body, ClusterEgressPolicySpec, DEFAULT_NAMESPACE, EgressPolicy, Gateway, Kind,
    MAX_OBJECT_NAME, Object, ObjectId, Origin, OverlayNode, UnclassedServices, pod, service, slice,
};
use crate::diagnostic::{Code, Diagnostic, ObjectLocation, Report, Severity};
use crate::manifest::custom_resources::{Document, Validate};
use crate::yaml::{Node, Position, Source, Value, YamlError, decode, join};

/// API group of vipgate's custom resources.
const API_GROUP: &str = "vipgate.io";

/// Handling of kinds that vipgate doesn't support.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnsupportedKinds {
    /// An error.
    Reject,
    /// Ignored, with a warning.
    Ignore,
    /// Ignored, with one warning per kind and document; an unknown kind of group `vipgate.io` is an error.
    IgnoreOtherGroups,
}

/// How manifests are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadOptions {
    /// Handling of kinds that vipgate doesn't support.
    pub unsupported: UnsupportedKinds,
    /// Handling of `LoadBalancer` Services without a class.
    pub unclassed: UnclassedServices,
}

impl From<UnsupportedKinds> for ReadOptions {
    fn from(unsupported: UnsupportedKinds) -> Self {
        Self { unsupported, unclassed: UnclassedServices::default() }
    }
}

/// Objects and diagnostics of files.
#[derive(Debug, Default)]
pub struct Manifests {
    /// Readable objects, in the order of the files.
    pub objects: Vec<Object>,
    /// Errors and warnings.
    pub diagnostics: Vec<Diagnostic>,
    /// Unreadable objects whose identity is known.
    pub unreadable: Vec<(ObjectLocation, ObjectId)>,
    /// Number of documents of any kind.
    pub documents: usize,
}

/// Reads the documents of one text.
pub fn read(source: &Arc<Source>, options: impl Into<ReadOptions>, into: &mut Manifests) {
    let options = options.into();
    let (nodes, diagnostics) = source.documents();
    into.diagnostics.extend(diagnostics);
    into.documents += nodes.len();
    for (document, node) in nodes.iter().enumerate() {
        let list = match (node.text("kind"), items(node)) {
            (Some(kind), Some(Value::List(items))) => kind.strip_suffix("List").map(|of| (of, items)),
            _ => None,
        };
        let mut reader = Reader { source, document, options, reported_kinds: BTreeSet::new(), into };
        match list {
            // `kubectl` prints the kind of a List after its items.
            None if node.get("kind").is_none() && matches!(items(node), Some(Value::List(_))) => {
                let line = u32::try_from(source.text().lines().count()).unwrap_or(u32::MAX);
                let reason = format!(
                    "is missing: the document is probably truncated at line {line}, since a List has its kind after \
                     its items"
                );
                let position = Position { line, column: 1 };
                let fault = YamlError { position, field: "kind".to_owned(), reason, code: Code::TruncatedList };
                reader.report(fault, None, Severity::Error);
            }
            None => reader.object(node, None, None),
            // Items of a `List` (kubectl) have kind and apiVersion; items of a `ServiceList` (API) don't.
            Some((of, items)) => {
                let version = node.text("apiVersion").unwrap_or_default();
                for (item, node) in items.iter().enumerate() {
                    reader.object(node, Some(item), Some((version, of)));
                }
            }
        }
    }
}

/// Reads an object that has no text, such as one of the Kubernetes API: its diagnostics have no line.
pub fn read_object(name: &str, object: serde_json::Value, options: impl Into<ReadOptions>, into: &mut Manifests) {
    let (source, options) = (Arc::new(Source::new(name, String::new())), options.into());
    into.documents += 1;
    let mut reader = Reader { source: &source, document: 0, options, reported_kinds: BTreeSet::new(), into };
    reader.object(&Node::from(object), None, None);
}

/// The items of a list.
fn items(node: &Node) -> Option<&Value> {
    node.get("items").map(|items| &items.value)
}

struct Reader<'a> {
    source: &'a Arc<Source>,
    document: usize,
    options: ReadOptions,
    /// Unsupported kinds that were reported.
    reported_kinds: BTreeSet<String>,
    into: &'a mut Manifests,
}

impl Reader<'_> {
    fn object(&mut self, node: &Node, item: Option<usize>, of: Option<(&str, &str)>) {
        let mut faults = Vec::new();
        let location = ObjectLocation { source: self.source.id(), document: self.document, item };
        match kind(node, of) {
            Ok(Some(kind)) => {
                let read = object(kind, node, self.options.unclassed, &mut faults);
                if read.is_none() {
                    self.into.unreadable.extend(readable_id(kind, node).map(|id| (location, id)));
                }
                if let Some((id, body)) = read {
                    faults.extend(former_kind(kind, node, of));
                    let origin =
                        Origin { source: self.source.clone(), document: self.document, item, line: node.position.line };
                    let name = id.to_string().into();
                    self.into.objects.push(Object { id, name, origin, body });
                }
            }
            // The CRDs of vipgate's kinds may be next to the manifests.
            Ok(None) if is_own_definition(node) => {}
            // A List truncated within its kind, e.g. at `kind: Lis`: items may be missing.
            Ok(None) if matches!(node.get("items").map(|items| &items.value), Some(Value::List(_))) => {
                let kind = node.text("kind").unwrap_or_default();
                let reason = format!("`{kind}` is not a List, but has items: is the document truncated?");
                faults.push((Severity::Error, at(node, Code::TruncatedList, "kind", reason)));
            }
            Ok(None) => {
                let kind = node.text("kind").unwrap_or_default();
                let is_own_group = group_of(node, of) == Some(API_GROUP);
                let (severity, what) = match self.options.unsupported {
                    UnsupportedKinds::IgnoreOtherGroups
                        if !is_own_group && !self.reported_kinds.insert(kind.to_owned()) =>
                    {
                        return;
                    }
                    UnsupportedKinds::IgnoreOtherGroups if is_own_group => (Severity::Error, "is not a supported kind"),
                    UnsupportedKinds::Reject => (Severity::Error, "is not a supported kind"),
                    UnsupportedKinds::Ignore | UnsupportedKinds::IgnoreOtherGroups => {
                        (Severity::Warning, "is not a supported kind and is ignored")
                    }
                };
                let supported = Kind::ALL.map(Kind::as_str).join(", ");
                let reason = format!("`{kind}` {what}; supported: {supported}");
                let fault = at(node, Code::UnsupportedKind, "kind", reason);
                self.report(fault, item, severity);
            }
            Err(fault) => {
                let kind = node.text("kind").and_then(Kind::named);
                self.into.unreadable.extend(kind.and_then(|kind| readable_id(kind, node)).map(|id| (location, id)));
                faults.push((Severity::Error, fault));
            }
        }
        for (severity, fault) in faults {
            self.report(fault, item, severity);
        }
    }

    fn report(&mut self, mut fault: YamlError, item: Option<usize>, severity: Severity) {
        if let Some(item) = item {
            fault.field = join(&format!("items[{item}]"), &fault.field);
        }
        let object = Some(ObjectLocation { source: self.source.id(), document: self.document, item });
        self.into.diagnostics.push(Diagnostic { severity, object, ..self.source.diagnostic(fault) });
    }
}

/// The kind of a document; `None` if it is not supported.
fn kind(node: &Node, of: Option<(&str, &str)>) -> Result<Option<Kind>, YamlError> {
    if !matches!(node.value, Value::Map(_)) {
        let reason = "is not an object: expected a map with apiVersion, kind, metadata and spec";
        return Err(at(node, Code::NotAnObject, "", reason.into()));
    }
    let of = of.filter(|(_, kind)| !kind.is_empty());
    let text_or = |field: &str, default: Option<&str>| match (node.text(field), default) {
        (Some(text), _) => Ok(text.to_owned()),
        (None, Some(default)) if node.get(field).is_none() => Ok(default.to_owned()),
        _ => Err(at(node, Code::MissingField, field, "is missing".into())),
    };
    let name = text_or("kind", of.map(|(_, kind)| kind))?;
    let version = text_or("apiVersion", of.map(|(version, _)| version))?;
    let Some(kind) = Kind::named(&name) else { return Ok(None) };
    if version == kind.api_version() {
        return Ok(Some(kind));
    }
    // Other API groups have kinds with the same names, e.g. `Gateway` of gateway.networking.k8s.io.
    let group = |version: &str| version.split_once('/').map(|(group, _)| group.to_owned());
    if group(&version) != group(kind.api_version()) {
        return Ok(None);
    }
    let reason = format!("`{version}` of {name} is not supported, expected {}", kind.api_version());
    Err(at(node, Code::UnsupportedVersion, "apiVersion", reason))
}

/// A warning if the document, or the list with it, has the former name of its kind.
fn former_kind(kind: Kind, node: &Node, of: Option<(&str, &str)>) -> Option<(Severity, YamlError)> {
    let name = node.text("kind").or(of.map(|(_, kind)| kind))?;
    (name != kind.as_str()).then(|| {
        let now = kind.as_str();
        let reason = format!("`{name}` is now `{now}`: write {now}; the former kind is still read");
        (Severity::Warning, at(node, Code::FormerKind, "kind", reason))
    })
}

/// The API group of a document, or of the list with it.
fn group_of<'a>(node: &'a Node, of: Option<(&'a str, &'a str)>) -> Option<&'a str> {
    let version = node.text("apiVersion").or(of.map(|(version, _)| version))?;
    version.split_once('/').map(|(group, _)| group)
}

/// Whether a document is a CustomResourceDefinition of group `vipgate.io`.
fn is_own_definition(node: &Node) -> bool {
    let group = node.get("spec").and_then(|spec| spec.text("group"));
    node.text("kind") == Some("CustomResourceDefinition") && group == Some(API_GROUP)
}

fn at(node: &Node, code: Code, field: &str, reason: String) -> YamlError {
    YamlError { position: node.locate(field), field: field.to_owned(), reason, code }
}

/// Errors and warnings about one object.
type Faults = Vec<(Severity, YamlError)>;

/// `metadata.name` and `metadata.namespace`.
struct ObjectName {
    name: Option<String>,
    namespace: Option<String>,
}

impl ObjectName {
    fn of(metadata: &ObjectMeta) -> Self {
        Self { name: metadata.name.clone(), namespace: metadata.namespace.clone() }
    }
}

/// Reads an object of a supported kind; `None` if it is unreadable. Errors and warnings are added to `faults`.
fn object(kind: Kind, node: &Node, unclassed: UnclassedServices, faults: &mut Faults) -> Option<(ObjectId, Body)> {
    match body(kind, node, unclassed, faults) {
        Ok((name, body)) => Some((id(kind, node, name, faults)?, body)),
        Err(fault) => {
            faults.push((Severity::Error, fault));
            None
        }
    }
}

fn body(
    kind: Kind,
    node: &Node,
    unclassed: UnclassedServices,
    faults: &mut Faults,
) -> Result<(ObjectName, Body), YamlError> {
    let report = &mut |severity, code, field: &str, reason| faults.push((severity, at(node, code, field, reason)));
    Ok(match kind {
        Kind::EndpointSlice => {
            let document: EndpointSlice = decode(node)?;
            (ObjectName::of(&document.metadata), Body::EndpointSlice(Box::new(slice::read(document, report))))
        }
        Kind::Namespace => {
            let document: Namespace = decode(node)?;
            (ObjectName::of(&document.metadata), Body::Namespace(Box::new(document)))
        }
        Kind::Node => {
            let document: v1::Node = decode(node)?;
            (ObjectName::of(&document.metadata), Body::Node(Box::new(document)))
        }
        Kind::Pod => {
            let document: Pod = decode(node)?;
            (ObjectName::of(&document.metadata), Body::Pod(Box::new(pod::read(document, report))))
        }
        Kind::Service => {
            let document: Service = decode(node)?;
            (ObjectName::of(&document.metadata), Body::Service(Box::new(service::read(&document, unclassed, report))))
        }
        Kind::ServiceCidr => {
            let document: ServiceCIDR = decode(node)?;
            (ObjectName::of(&document.metadata), Body::ServiceCidr(Box::new(document)))
        }
        Kind::AddressPool => {
            let (metadata, spec) = custom_resource(node, report)?;
            let recorded = recorded(node, report).map(Arc::new);
            let pool = AddressPool { metadata, spec, cloud: None, recorded };
            (ObjectName::of(&pool.metadata), Body::AddressPool(Box::new(pool)))
        }
        Kind::ClusterEgressPolicy => {
            let (metadata, ClusterEgressPolicySpec(spec)) = custom_resource(node, report)?;
            (ObjectName::of(&metadata), Body::ClusterEgressPolicy(Box::new(EgressPolicy { metadata, spec })))
        }
        Kind::EgressPolicy => {
            let (metadata, spec) = custom_resource(node, report)?;
            (ObjectName::of(&metadata), Body::EgressPolicy(Box::new(EgressPolicy { metadata, spec })))
        }
        Kind::Gateway => {
            let (metadata, spec) = custom_resource(node, report)?;
            (ObjectName::of(&metadata), Body::Gateway(Box::new(Gateway { metadata, spec })))
        }
        Kind::OverlayNode => {
            let (metadata, spec) = custom_resource(node, report)?;
            (ObjectName::of(&metadata), Body::OverlayNode(Box::new(OverlayNode { metadata, spec })))
        }
    })
}

fn custom_resource<S: DeserializeOwned + Validate>(
    node: &Node,
    report: &mut Report<'_>,
) -> Result<(ObjectMeta, S), YamlError> {
    let document: Document<S> = decode(node)?;
    document.spec.validate(&mut |code, field, reason| report(Severity::Error, code, field, reason));
    Ok((document.metadata, document.spec))
}

/// The part of a pool's status that is read.
#[derive(Debug, Default, Deserialize)]
struct PoolStatus {
    addresses: Option<Vec<String>>,
}

/// What the status of a pool has recorded. Only the policy server writes there, so a line that it didn't write is ignored.
fn recorded(node: &Node, report: &mut Report<'_>) -> Option<AddressRecord> {
    let PoolStatus { addresses } = decode(node.get("status")?).unwrap_or_default();
    let addresses = addresses?;
    let mut record = AddressRecord::default();
    for (i, line) in addresses.iter().enumerate() {
        match AddressRecord::from_lines([line.as_str()]) {
            Ok(one) => record.extend(&one),
            Err(error) => {
                report(Severity::Warning, Code::MalformedValue, &format!("status.addresses[{i}]"), error.to_string());
            }
        }
    }
    Some(record)
}

/// The identity of an unreadable object, if its metadata is readable.
fn readable_id(kind: Kind, node: &Node) -> Option<ObjectId> {
    let metadata = node.get("metadata")?;
    let name = metadata.text("name")?.to_owned();
    let namespace = match (metadata.text("namespace"), kind.is_namespaced()) {
        (_, false) => String::new(),
        (None, true) => DEFAULT_NAMESPACE.to_owned(),
        (Some(namespace), true) => namespace.to_owned(),
    };
    let is_named = is_path_segment(&name) && (!kind.is_namespaced() || is_path_segment(&namespace));
    is_named.then_some(ObjectId { kind, namespace, name })
}

/// Whether a name is one word: in logs, metrics and the record of addresses it stands beside others, with its namespace
/// before it. Kubernetes' own names are stricter.
fn is_path_segment(name: &str) -> bool {
    let is_separator = |c: char| c == '/' || c.is_whitespace() || c.is_control();
    !name.is_empty() && name.len() <= MAX_OBJECT_NAME && !name.contains(is_separator)
}

fn id(kind: Kind, node: &Node, metadata: ObjectName, faults: &mut Faults) -> Option<ObjectId> {
    let mut fault = |code, field, reason| faults.push((Severity::Error, at(node, code, field, reason)));
    let Some(name) = metadata.name.filter(|name| !name.is_empty()) else {
        fault(Code::MissingField, "metadata.name", "is missing".into());
        return None;
    };
    let namespace = match (metadata.namespace, kind.is_namespaced()) {
        // As `kubectl apply` does.
        (None, true) => DEFAULT_NAMESPACE.to_owned(),
        (Some(namespace), true) => namespace,
        (None, false) => String::new(),
        (Some(_), false) => {
            let reason = format!("{} objects are cluster-scoped", kind.as_str());
            fault(Code::ClusterScoped, "metadata.namespace", reason);
            String::new()
        }
    };
    let named = [("metadata.name", &name, true), ("metadata.namespace", &namespace, kind.is_namespaced())];
    for (field, text, is_needed) in named {
        if is_needed && !is_path_segment(text) {
            let reason = "is empty, longer than 253 bytes, or has whitespace, `/` or unprintable characters";
            fault(Code::InvalidName, field, reason.into());
            return None;
        }
    }
    Some(ObjectId { kind, namespace, name })
}
