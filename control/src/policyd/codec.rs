//! gRPC codec of the discovery service. Responses are encoded once for all gateways; each stream appends its nonce,
//! since protobuf fields may come in any order. Requests: only the fields that the server reads are decoded, after
//! their size in memory was estimated: an empty name is two bytes on the wire and twelve times as much in memory.

use std::collections::HashMap;

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::config::core::v3::node::UserAgentVersionType;
use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use envoy_types::pb::google::protobuf::Struct;
use envoy_types::pb::google::rpc;
use prost::Message;
use prost::bytes::{Buf as _, BufMut, Bytes};
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};
use tonic::Status;
use tonic::codec::{DecodeBuf, Decoder, EncodeBuf, Encoder};

use super::budget::Charge;

/// Maximum estimated size of a request in memory, bytes.
const MAX_DECODED_BYTES: usize = 64 << 20;
/// Overhead of a name beside its bytes: its list entry and the allocator's header.
const NAME_OVERHEAD: usize = 64;
/// Overhead of a name with its version beside their bytes: two strings, and an entry of a hash table that may be half
/// empty.
const VERSION_OVERHEAD: usize = 128;
/// Memory per byte of metadata: six bytes encode a map in a list, which takes some 450.
const METADATA_FACTOR: usize = 96;
/// Maximum length of `node.metadata`, bytes. Service meshes send some thousands.
const MAX_METADATA_BYTES: usize = 64 << 10;

/// A response, encoded except for its nonce.
#[derive(Debug)]
pub struct Response {
    /// All other fields, encoded.
    pub bytes: Bytes,
    /// The nonce that the client acknowledges.
    pub nonce: String,
    /// Memory charged until it is encoded or dropped with its stream.
    pub charge: Option<Charge>,
}

/// The fields of a request that are decoded; all others are skipped and take no memory.
#[derive(Clone, PartialEq, Message)]
struct SlimRequest {
    #[prost(message, optional, tag = "1")]
    node: Option<SlimNode>,
    #[prost(string, tag = "2")]
    type_url: String,
    #[prost(string, repeated, tag = "3")]
    resource_names_subscribe: Vec<String>,
    #[prost(string, repeated, tag = "4")]
    resource_names_unsubscribe: Vec<String>,
    #[prost(map = "string, string", tag = "5")]
    initial_resource_versions: HashMap<String, String>,
    #[prost(string, tag = "6")]
    response_nonce: String,
    #[prost(message, optional, tag = "7")]
    error_detail: Option<SlimStatus>,
}

/// Subset of `envoy.config.core.v3.Node`. Its list of extensions alone may take 84 times as much in memory as on the
/// wire.
#[derive(Clone, PartialEq, Message)]
struct SlimNode {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(message, optional, tag = "3")]
    metadata: Option<Struct>,
    #[prost(string, tag = "7")]
    user_agent_version: String,
}

/// Subset of `google.rpc.Status`.
#[derive(Clone, PartialEq, Message)]
struct SlimStatus {
    #[prost(string, tag = "2")]
    message: String,
}

impl From<SlimRequest> for DeltaDiscoveryRequest {
    fn from(slim: SlimRequest) -> Self {
        let version = |text| Some(UserAgentVersionType::UserAgentVersion(text));
        let node = |SlimNode { id, metadata, user_agent_version: text }| {
            let user_agent_version_type = if text.is_empty() { None } else { version(text) };
            Node { id, metadata, user_agent_version_type, ..Node::default() }
        };
        let status = |SlimStatus { message }| rpc::Status { message, ..rpc::Status::default() };
        Self {
            node: slim.node.map(node),
            type_url: slim.type_url,
            resource_names_subscribe: slim.resource_names_subscribe,
            resource_names_unsubscribe: slim.resource_names_unsubscribe,
            initial_resource_versions: slim.initial_resource_versions,
            response_nonce: slim.response_nonce,
            error_detail: slim.error_detail.map(status),
            ..Self::default()
        }
    }
}

/// Encodes responses and decodes requests.
#[derive(Clone, Copy, Debug, Default)]
pub struct Codec;

impl tonic::codec::Codec for Codec {
    type Encode = Response;
    type Decode = DeltaDiscoveryRequest;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        *self
    }

    fn decoder(&mut self) -> Self::Decoder {
        *self
    }
}

impl Decoder for Codec {
    type Item = DeltaDiscoveryRequest;
    type Error = Status;

    fn decode(&mut self, source: &mut DecodeBuf<'_>) -> Result<Option<DeltaDiscoveryRequest>, Status> {
        decode(source.copy_to_bytes(source.remaining())).map(Some)
    }
}

fn decode(bytes: Bytes) -> Result<DeltaDiscoveryRequest, Status> {
    let (size, metadata) = estimate(&bytes);
    if metadata > MAX_METADATA_BYTES {
        let reason = format!("node.metadata exceeds {} KiB", MAX_METADATA_BYTES >> 10);
        return Err(Status::resource_exhausted(reason));
    }
    if size > MAX_DECODED_BYTES {
        let reason = format!("the names and fields of the request exceed {} MiB in memory", MAX_DECODED_BYTES >> 20);
        return Err(Status::resource_exhausted(reason));
    }
    SlimRequest::decode(bytes).map(DeltaDiscoveryRequest::from).map_err(|error| Status::internal(error.to_string()))
}

/// Estimated size of a request in memory, and the length of its node's metadata. Stops at malformed bytes: the decoder
/// reports them.
fn estimate(bytes: &[u8]) -> (usize, usize) {
    let (mut size, mut metadata) = (0, 0);
    for_each_field(bytes, |field, value| match field {
        1 => for_each_field(value, |field, value| match field {
            1 | 7 => size += value.len(),
            3 => metadata += value.len(),
            _ => {}
        }),
        3 | 4 => size += value.len() + NAME_OVERHEAD,
        5 => size += value.len() + VERSION_OVERHEAD,
        2 | 6 | 7 => size += value.len(),
        _ => {}
    });
    (size + METADATA_FACTOR * metadata, metadata)
}

/// Size in memory of a decoded request without its node, bytes.
pub(super) fn cost(request: &DeltaDiscoveryRequest) -> usize {
    let names = request.resource_names_subscribe.iter().chain(&request.resource_names_unsubscribe);
    let names: usize = names.map(|name| name.len() + NAME_OVERHEAD).sum();
    let versions = request.initial_resource_versions.iter();
    let versions: usize = versions.map(|(name, version)| name.len() + version.len() + VERSION_OVERHEAD).sum();
    let status = request.error_detail.as_ref().map_or(0, |status| status.message.len());
    size_of::<DeltaDiscoveryRequest>()
        + request.type_url.len()
        + request.response_nonce.len()
        + status
        + names
        + versions
}

/// Calls `visit` for each length-delimited field of a message, with its number.
fn for_each_field(mut bytes: &[u8], mut visit: impl FnMut(u32, &[u8])) {
    while !bytes.is_empty() {
        let Ok((field, wire)) = decode_key(&mut bytes) else { return };
        if wire != WireType::LengthDelimited {
            if skip_field(wire, field, &mut bytes, DecodeContext::default()).is_err() {
                return;
            }
            continue;
        }
        let length = decode_varint(&mut bytes).ok().and_then(|length| usize::try_from(length).ok());
        let Some(length) = length else { return };
        let Some((value, rest)) = bytes.split_at_checked(length) else { return };
        visit(field, value);
        bytes = rest;
    }
}

impl Encoder for Codec {
    type Item = Response;
    type Error = Status;

    fn encode(&mut self, response: Response, buf: &mut EncodeBuf<'_>) -> Result<(), Status> {
        let Response { bytes, nonce, charge } = response;
        buf.put(bytes);
        // Encoded bytes are charged by the response body (`meter`).
        drop(charge);
        let nonce_only = DeltaDiscoveryResponse { nonce, ..DeltaDiscoveryResponse::default() };
        nonce_only.encode(buf).map_err(|error| Status::internal(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use envoy_types::pb::envoy::config::core::v3::Extension;
    use envoy_types::pb::google::protobuf::value::Kind as ValueKind;
    use envoy_types::pb::google::protobuf::{Any, ListValue, Value};

    use super::*;

    fn names(count: usize) -> DeltaDiscoveryRequest {
        DeltaDiscoveryRequest {
            resource_names_subscribe: vec![String::new(); count],
            ..DeltaDiscoveryRequest::default()
        }
    }

    fn of_node(node: Node) -> DeltaDiscoveryRequest {
        DeltaDiscoveryRequest { node: Some(node), ..DeltaDiscoveryRequest::default() }
    }

    #[test]
    fn a_request_is_limited_by_its_size_in_memory_not_on_the_wire() {
        let encoded = names(1000).encode_to_vec();
        assert_eq!((encoded.len(), estimate(&encoded)), (2000, (1000 * NAME_OVERHEAD, 0)));
        let versions = DeltaDiscoveryRequest {
            initial_resource_versions: (0..10).map(|n| (n.to_string(), "v".to_owned())).collect(),
            ..names(0)
        };
        assert_eq!(estimate(&versions.encode_to_vec()), (10 * (6 + VERSION_OVERHEAD), 0));
        let max_names = MAX_DECODED_BYTES / NAME_OVERHEAD;
        assert!(decode(names(max_names).encode_to_vec().into()).is_ok());
        let error = decode(names(max_names + 1).encode_to_vec().into()).unwrap_err();
        assert_eq!(error.code(), tonic::Code::ResourceExhausted);
        // Malformed bytes end the estimate; a length beyond the message counts for nothing.
        assert_eq!(estimate(&[0x1a, 0xff, 0xff, 0xff, 0x7f]), (0, 0));
        assert_eq!(estimate(&[0xff; 32]), (0, 0));
    }

    #[test]
    fn fields_that_the_server_does_not_read_are_not_decoded() {
        let value = Value { kind: Some(ValueKind::StringValue("17".to_owned())) };
        let metadata = Some(Struct { fields: [("incarnation".to_owned(), value)].into() });
        let user_agent_version_type = Some(UserAgentVersionType::UserAgentVersion("1.2".to_owned()));
        let expected = DeltaDiscoveryRequest {
            type_url: "type".to_owned(),
            resource_names_subscribe: vec!["a".to_owned(), "b".to_owned()],
            resource_names_unsubscribe: vec!["c".to_owned()],
            initial_resource_versions: [("d".to_owned(), "1".to_owned())].into(),
            response_nonce: "7".to_owned(),
            error_detail: Some(rpc::Status { message: "no".to_owned(), ..rpc::Status::default() }),
            ..of_node(Node { id: "gw-a".to_owned(), metadata, user_agent_version_type, ..Node::default() })
        };
        assert_eq!(decode(expected.encode_to_vec().into()).unwrap(), expected);
        let mut request = expected.clone();
        if let (Some(node), Some(status)) = (&mut request.node, &mut request.error_detail) {
            node.extensions = vec![Extension::default(); 10_000];
            node.client_features = vec![String::new(); 10_000];
            status.details = vec![Any::default(); 10_000];
        }
        let encoded = request.encode_to_vec();
        assert_eq!(decode(encoded.into()).unwrap(), expected);
    }

    #[test]
    fn metadata_is_limited_and_counted_by_its_size_in_memory() {
        let list = |count| {
            let list = ListValue { values: vec![Value::default(); count] };
            let list = Value { kind: Some(ValueKind::ListValue(list)) };
            let metadata = Struct { fields: [("list".to_owned(), list)].into() };
            Bytes::from(of_node(Node { metadata: Some(metadata), ..Node::default() }).encode_to_vec())
        };
        let half = MAX_METADATA_BYTES / 2;
        let (size, metadata) = estimate(&list(half - 50));
        assert!((MAX_METADATA_BYTES - 100..MAX_METADATA_BYTES).contains(&metadata), "{metadata}");
        assert!(size > (half - 50) * size_of::<Value>() * 2, "{size}");
        assert!(decode(list(half - 50)).is_ok());
        let error = decode(list(half)).unwrap_err();
        assert!(error.message().contains("node.metadata exceeds 64 KiB"), "{error}");
    }
}
