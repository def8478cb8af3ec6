//! Memory of the packet path.

/// Placeholder until the frame module lands.
#[derive(Debug)]
pub struct Frame;
