//! Responses on the wire: encoded once for all gateways, but for the nonce, which each stream adds. Fields of a message may
//! stand in any order, so the nonce goes to the end.

use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use prost::Message;
use prost::bytes::{BufMut, Bytes};
use tonic::Status;
use tonic::codec::{BufferSettings, EncodeBuf, Encoder};
use tonic_prost::ProstDecoder;

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
    type Decoder = ProstDecoder<DeltaDiscoveryRequest>;

    fn encoder(&mut self) -> Self {
        *self
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstDecoder::new(BufferSettings::default())
    }
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
