//! Responses on the wire: encoded once for all gateways, but for the nonce, which each stream adds. Fields of a message may
//! stand in any order, so the nonce goes to the end. Requests are weighed before they are decoded: two bytes make an empty name, which
//! takes twelve times as much in memory.

use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use prost::Message;
use prost::bytes::{Buf as _, BufMut, Bytes};
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};
use tonic::Status;
use tonic::codec::{DecodeBuf, Decoder, EncodeBuf, Encoder};

/// What a request may weigh: about the bytes that it takes in memory.
const HEAVIEST: usize = 64 << 20;
/// What a name in a request weighs beside its bytes.
const NAME: usize = 64;
/// What other fields weigh for each of their bytes: they may hold messages of any shape.
const OTHERS: usize = 16;
/// `resource_names_subscribe`, `resource_names_unsubscribe` and `initial_resource_versions`.
const NAMES: [u32; 3] = [3, 4, 5];

/// A response that is encoded but for its nonce.
#[derive(Clone, Debug)]
pub struct Response {
    /// All other fields.
    pub bytes: Bytes,
    /// Its nonce.
    pub nonce: String,
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
        let bytes = source.copy_to_bytes(source.remaining());
        if weigh(&bytes) > HEAVIEST {
            let why = format!("a request with more names and fields than {} MiB hold", HEAVIEST >> 20);
            return Err(Status::resource_exhausted(why));
        }
        DeltaDiscoveryRequest::decode(bytes).map(Some).map_err(|error| Status::internal(error.to_string()))
    }
}

/// What a request weighs, as far as it can be read: decoding says what is wrong with it.
fn weigh(mut bytes: &[u8]) -> usize {
    let mut weight = 0_usize;
    while !bytes.is_empty() {
        let Ok((field, wire)) = decode_key(&mut bytes) else { break };
        if wire != WireType::LengthDelimited {
            if skip_field(wire, field, &mut bytes, DecodeContext::default()).is_err() {
                break;
            }
            continue;
        }
        let length = decode_varint(&mut bytes).ok().and_then(|length| usize::try_from(length).ok());
        let Some(length) = length.filter(|length| *length <= bytes.len()) else { break };
        bytes.advance(length);
        weight += if NAMES.contains(&field) { length + NAME } else { OTHERS * (length + NAME) };
    }
    weight
}

impl Encoder for Codec {
    type Item = Response;
    type Error = Status;

    fn encode(&mut self, Response { bytes, nonce }: Response, buf: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buf.put(bytes);
        let rest = DeltaDiscoveryResponse { nonce, ..DeltaDiscoveryResponse::default() };
        rest.encode(buf).map_err(|error| Status::internal(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use envoy_types::pb::envoy::config::core::v3::Node;

    use super::*;

    #[test]
    fn a_request_weighs_what_it_takes_in_memory_and_not_what_it_takes_on_the_wire() {
        let names = |count: usize| DeltaDiscoveryRequest {
            resource_names_subscribe: vec![String::new(); count],
            ..DeltaDiscoveryRequest::default()
        };
        let encoded = names(1000).encode_to_vec();
        assert_eq!((encoded.len(), weigh(&encoded)), (2000, 1000 * NAME));
        let more = DeltaDiscoveryRequest {
            node: Some(Node { client_features: vec![String::new(); 500], ..Node::default() }),
            initial_resource_versions: (0..10).map(|n| (n.to_string(), "v".to_owned())).collect(),
            ..names(0)
        };
        let encoded = more.encode_to_vec();
        assert_eq!(weigh(&encoded), OTHERS * (1000 + NAME) + 10 * (6 + NAME));
        assert!(
            weigh(&names(1 << 20).encode_to_vec()) <= HEAVIEST
                && weigh(&names((1 << 20) + 1).encode_to_vec()) > HEAVIEST
        );
        // What can't be read ends it; nothing is believed of lengths.
        assert_eq!(weigh(&[0x1a, 0xff, 0xff, 0xff, 0x7f]), 0);
        assert_eq!(weigh(&[0xff; 32]), 0);
    }
}
