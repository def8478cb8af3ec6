//! Real handshakes, and what both sides say when one fails.

mod files;
mod handshake;
mod names;

use super::*;
use crate::xds::fixtures::pki::{Authority, Identity};
