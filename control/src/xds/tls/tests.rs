//! TLS tests: handshakes, files, names.

mod files;
mod handshake;
mod names;

use super::*;
use crate::xds::fixtures::pki::{Authority, Identity};
