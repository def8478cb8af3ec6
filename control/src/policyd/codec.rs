//! Responses on the wire: encoded once for all gateways, but for the nonce, which each stream adds. Fields of a message may
//! stand in any order, so the nonce goes to the end. Of requests only that is decoded which the server looks at, and they are weighed
//! before: two bytes make an empty name, which takes twelve times as much in memory.

use std::collections::HashMap;

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use envoy_types::pb::google::protobuf::Struct;
use envoy_types::pb::google::rpc;
use prost::Message;
use prost::bytes::{Buf as _, BufMut, Bytes};
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};
use tonic::Status;
use tonic::codec::{DecodeBuf, Decoder, EncodeBuf, Encoder};

use super::budget::Charge;

/// What a request may weigh: about the bytes that it takes in memory.
const HEAVIEST: usize = 64 << 20;
/// What a name in a request weighs beside its bytes: its place in a list, and what the allocator adds.
const NAME: usize = 64;
/// What a name with its version weighs beside their bytes: two texts, and their place in a hash table that may be half empty.
const VERSION: usize = 128;
/// What metadata weigh for each of their bytes: six of them make a map in a list, which takes some 450.
const METADATA: usize = 96;
/// The longest `node.metadata`, bytes. Those of service meshes have some thousands.
const LONGEST_METADATA: usize = 64 << 10;

/// A response that is encoded but for its nonce.
#[derive(Debug)]
pub struct Response {
    /// All other fields.
    pub bytes: Bytes,
    /// Its nonce.
    pub nonce: String,
    /// What is held for it: until it is encoded, or dropped with its stream.
    pub charge: Option<Charge>,
}

/// What is decoded of a request: the rest is skipped, and takes no memory.
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

/// Of `envoy.config.core.v3.Node`. Its list of extensions alone may take 84 times as much in memory as on the wire.
#[derive(Clone, PartialEq, Message)]
struct SlimNode {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(message, optional, tag = "3")]
    metadata: Option<Struct>,
}

/// Of `google.rpc.Status`.
#[derive(Clone, PartialEq, Message)]
struct SlimStatus {
    #[prost(string, tag = "2")]
    message: String,
}

impl From<SlimRequest> for DeltaDiscoveryRequest {
    fn from(slim: SlimRequest) -> Self {
        let node = |SlimNode { id, metadata }| Node { id, metadata, ..Node::default() };
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

/// What writes responses and reads requests.
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
    let (weight, metadata) = weigh(&bytes);
    if metadata > LONGEST_METADATA {
        let why = format!("node.metadata of more than {} KiB", LONGEST_METADATA >> 10);
        return Err(Status::resource_exhausted(why));
    }
    if weight > HEAVIEST {
        let why = format!("a request with more names and fields than {} MiB hold", HEAVIEST >> 20);
        return Err(Status::resource_exhausted(why));
    }
    SlimRequest::decode(bytes).map(DeltaDiscoveryRequest::from).map_err(|error| Status::internal(error.to_string()))
}

/// What a request weighs, and how long its node's metadata are, as far as it can be read: decoding says what is wrong with it.
fn weigh(bytes: &[u8]) -> (usize, usize) {
    let (mut weight, mut metadata) = (0, 0);
    for_each_field(bytes, |field, value| match field {
        1 => for_each_field(value, |field, value| match field {
            1 => weight += value.len(),
            3 => metadata += value.len(),
            _ => {}
        }),
        3 | 4 => weight += value.len() + NAME,
        5 => weight += value.len() + VERSION,
        2 | 6 | 7 => weight += value.len(),
        _ => {}
    });
    (weight + METADATA * metadata, metadata)
}

/// What a request costs that is kept until it can be answered, but for its node.
pub(super) fn cost(request: &DeltaDiscoveryRequest) -> usize {
    let subscribe = request.resource_names_subscribe.iter().chain(&request.resource_names_unsubscribe);
    let names: usize = subscribe.map(|name| name.len() + NAME).sum();
    let versions = request.initial_resource_versions.iter();
    let versions: usize = versions.map(|(name, version)| name.len() + version.len() + VERSION).sum();
    let status = request.error_detail.as_ref().map_or(0, |status| status.message.len());
    size_of::<DeltaDiscoveryRequest>()
        + request.type_url.len()
        + request.response_nonce.len()
        + status
        + names
        + versions
}

/// Shows the fields of a message that have a length, with their numbers.
fn for_each_field(mut bytes: &[u8], mut show: impl FnMut(u32, &[u8])) {
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
        show(field, value);
        bytes = rest;
    }
}

impl Encoder for Codec {
    type Item = Response;
    type Error = Status;

    fn encode(&mut self, response: Response, buf: &mut EncodeBuf<'_>) -> Result<(), Status> {
        let Response { bytes, nonce, charge } = response;
        buf.put(bytes);
        // What is encoded is counted where it is sent.
        drop(charge);
        let rest = DeltaDiscoveryResponse { nonce, ..DeltaDiscoveryResponse::default() };
        rest.encode(buf).map_err(|error| Status::internal(error.to_string()))
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
    fn a_request_weighs_what_it_takes_in_memory_and_not_what_it_takes_on_the_wire() {
        let encoded = names(1000).encode_to_vec();
        assert_eq!((encoded.len(), weigh(&encoded)), (2000, (1000 * NAME, 0)));
        let versions = DeltaDiscoveryRequest {
            initial_resource_versions: (0..10).map(|n| (n.to_string(), "v".to_owned())).collect(),
            ..names(0)
        };
        assert_eq!(weigh(&versions.encode_to_vec()), (10 * (6 + VERSION), 0));
        let most = HEAVIEST / NAME;
        assert!(decode(names(most).encode_to_vec().into()).is_ok());
        let refusal = decode(names(most + 1).encode_to_vec().into()).unwrap_err();
        assert_eq!(refusal.code(), tonic::Code::ResourceExhausted);
        // What can't be read ends it; nothing is believed of lengths.
        assert_eq!(weigh(&[0x1a, 0xff, 0xff, 0xff, 0x7f]), (0, 0));
        assert_eq!(weigh(&[0xff; 32]), (0, 0));
    }

    #[test]
    fn what_the_server_does_not_look_at_is_not_decoded() {
        let value = Value { kind: Some(ValueKind::StringValue("17".to_owned())) };
        let metadata = Some(Struct { fields: [("incarnation".to_owned(), value)].into() });
        let wanted = DeltaDiscoveryRequest {
            type_url: "type".to_owned(),
            resource_names_subscribe: vec!["a".to_owned(), "b".to_owned()],
            resource_names_unsubscribe: vec!["c".to_owned()],
            initial_resource_versions: [("d".to_owned(), "1".to_owned())].into(),
            response_nonce: "7".to_owned(),
            error_detail: Some(rpc::Status { message: "no".to_owned(), ..rpc::Status::default() }),
            ..of_node(Node { id: "gw-a".to_owned(), metadata, ..Node::default() })
        };
        assert_eq!(decode(wanted.encode_to_vec().into()).unwrap(), wanted);
        let mut request = wanted.clone();
        if let (Some(node), Some(status)) = (&mut request.node, &mut request.error_detail) {
            node.extensions = vec![Extension::default(); 10_000];
            node.client_features = vec![String::new(); 10_000];
            status.details = vec![Any::default(); 10_000];
        }
        let encoded = request.encode_to_vec();
        assert_eq!(decode(encoded.into()).unwrap(), wanted);
    }

    #[test]
    fn metadata_are_short_and_weigh_what_they_take_in_memory() {
        let list = |count| {
            let list = ListValue { values: vec![Value::default(); count] };
            let list = Value { kind: Some(ValueKind::ListValue(list)) };
            let metadata = Struct { fields: [("list".to_owned(), list)].into() };
            Bytes::from(of_node(Node { metadata: Some(metadata), ..Node::default() }).encode_to_vec())
        };
        let half = LONGEST_METADATA / 2;
        let (weight, metadata) = weigh(&list(half - 50));
        assert!((LONGEST_METADATA - 100..LONGEST_METADATA).contains(&metadata), "{metadata}");
        assert!(weight > (half - 50) * size_of::<Value>() * 2, "{weight}");
        assert!(decode(list(half - 50)).is_ok());
        let refusal = decode(list(half)).unwrap_err();
        assert!(refusal.message().contains("node.metadata of more than 64 KiB"), "{refusal}");
    }
}
