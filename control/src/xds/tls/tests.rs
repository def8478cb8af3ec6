//! TLS tests: handshakes, files, names, validity.

mod files;
mod handshake;
mod names;
mod validity;

use super::*;
use crate::xds::fixtures::pki::{Authority, Identity};
