//! Real handshakes, and what both sides say when one fails.

mod files;
mod handshake;

use super::*;
use crate::xds::fixtures::pki::{Authority, Identity};
