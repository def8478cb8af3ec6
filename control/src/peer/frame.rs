//! Frames: a length of four bytes, big-endian, and a message. Whatever comes is suspected until it is read: the length is looked at
//! before anything is set aside for it.

use std::sync::Arc;

use prost::Message;
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncReadExt};

use super::proto::frame::Kind;
use super::proto::{Farewell, Frame};

/// The longest message in bytes.
pub(super) const LONGEST: usize = 1 << 20;

/// Why a link has ended, or never came to be.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Broken {
    /// The connection is gone, or couldn't be made.
    #[error("{0}")]
    Connection(String),
    /// Its beats are missing.
    #[error("nothing came from it for {0} ms")]
    Silent(u128),
    /// It doesn't take what it is sent.
    #[error("it takes nothing that it is sent")]
    Stuck,
    /// A frame is longer than it may be.
    #[error("it sent a frame of {0} bytes, and at most {LONGEST} are allowed")]
    TooLong(usize),
    /// A frame isn't one.
    #[error("it sent what is no frame: {0}")]
    Garbage(String),
    /// Frames that don't belong where they are.
    #[error("it doesn't keep to the protocol: {0}")]
    Protocol(&'static str),
    /// There is no version that both know.
    #[error("it speaks versions {} to {} of the protocol, this gateway {} to {}: update the older one", .theirs.0, .theirs.1, .ours.0, .ours.1)]
    Version {
        /// What it knows, from and to.
        theirs: (u32, u32),
        /// What we know.
        ours: (u32, u32),
    },
    /// It isn't who its certificate says.
    #[error("it calls itself {said}, and its certificate is {pinned}'s")]
    Name {
        /// What it says.
        said: String,
        /// Whose the certificate is.
        pinned: Arc<str>,
    },
    /// It is another process of that name than the view means.
    #[error("the view means another process of this name")]
    Incarnation,
    /// The view names no such certificate, or no more.
    #[error("its certificate isn't, or is no longer, the one that the view names")]
    Unpinned,
    /// The view names no gateway at the address that it connects from.
    #[error("no other gateway of the view has this address")]
    UnknownAddress,
    /// A newer link of the same process takes its place.
    #[error("it has connected anew")]
    Replaced,
    /// It has ended the link, and says why.
    #[error("it ended the link: {0}")]
    Refused(String),
    /// Our workers don't take its sessions.
    #[error("worker {0} of this gateway takes no copies of its sessions: it is stuck, or the gateway stops")]
    Worker(usize),
    /// The gateway stops.
    #[error("this gateway stops")]
    Stopping,
}

impl Broken {
    /// Whether it is somebody whom we don't let in, or no longer, and not merely somebody who isn't there.
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::TooLong(_)
            | Self::Garbage(_)
            | Self::Protocol(_)
            | Self::Version { .. }
            | Self::Name { .. }
            | Self::Incarnation
            | Self::UnknownAddress
            | Self::Unpinned => true,
            Self::Connection(_)
            | Self::Silent(_)
            | Self::Stuck
            | Self::Replaced
            | Self::Refused(_)
            | Self::Worker(_)
            | Self::Stopping => false,
        }
    }
}

impl From<std::io::Error> for Broken {
    fn from(error: std::io::Error) -> Self {
        let text = error.to_string();
        if text.contains("ApplicationVerificationFailure") {
            return Self::Unpinned;
        }
        let hint = if text.contains("AccessDenied") || text.contains("CertificateUnknown") {
            ": it doesn't know this gateway's certificate: its view is older, or another one"
        } else if text.contains("InvalidContentType") || text.contains("corrupt message") {
            ": what is there doesn't speak TLS"
        } else {
            ""
        };
        Self::Connection(format!("{text}{hint}"))
    }
}

/// A frame as it goes over the wire.
pub(crate) fn encode(kind: Kind) -> Vec<u8> {
    let frame = Frame { kind: Some(kind) };
    let length = frame.encoded_len();
    let mut bytes = Vec::with_capacity(4 + length);
    bytes.extend_from_slice(&(length as u32).to_be_bytes());
    frame.encode_raw(&mut bytes);
    bytes
}

/// The last frame of a link.
pub(super) fn farewell(reason: &Broken) -> Vec<u8> {
    encode(Kind::Farewell(Farewell { reason: reason.to_string() }))
}

/// Reads the next frame; `None` is one of a kind that this version doesn't know. Not to be given up halfway.
pub(crate) async fn read(stream: &mut (impl AsyncRead + Unpin), buffer: &mut Vec<u8>) -> Result<Option<Kind>, Broken> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).await?;
    let length = u32::from_be_bytes(length) as usize;
    if length > LONGEST {
        return Err(Broken::TooLong(length));
    }
    buffer.resize(length, 0);
    stream.read_exact(buffer).await?;
    let frame = Frame::decode(buffer.as_slice()).map_err(|error| Broken::Garbage(error.to_string()))?;
    Ok(frame.kind)
}
