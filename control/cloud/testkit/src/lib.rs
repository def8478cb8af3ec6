//! Fake clouds for tests: HTTP servers with the state, the rules and the errors of AWS, Azure and GCP, verified by the vendors' own
//! clients; with faults, lag, and a log of requests.

#![forbid(unsafe_code)]

pub mod aws;
pub mod azure;
mod fault;
pub mod gcp;
mod request;
mod server;
mod token;

pub use self::fault::{Fault, Faults};
pub use self::gcp::{FakeGcp, GcpAccessConfig, GcpAddress, GcpInstance, GcpInterface, GcpState};
pub use self::request::{RecordedRequest, Reply};
pub use self::server::{FakeCloud, FakeServer};
pub use self::token::Tokens;
