//! pcap files with timestamps in nanoseconds.

/// A captured frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Nanoseconds of the wall clock.
    pub time: u64,
    /// Number of the capture.
    pub capture: usize,
    /// Captured bytes, up to the snap length.
    pub bytes: Vec<u8>,
    /// Its length on the wire.
    pub length: usize,
}

/// pcap magic with nanosecond timestamps, in this machine's byte order.
const MAGIC: u32 = 0xa1b2_3c4d;
const FILE_HEADER: usize = 24;
const FRAME_HEADER: usize = 16;

/// The frames of a file. An incomplete frame at its end is left out.
pub fn read_pcap(file: &[u8], capture: usize) -> Vec<Frame> {
    let word = |at: usize| file.get(at..at + 4).map(|bytes| u32::from_ne_bytes(bytes.try_into().unwrap()));
    assert_eq!(word(0), Some(MAGIC), "no pcap file with nanoseconds in this machine's byte order");
    let (mut at, mut frames) = (FILE_HEADER, Vec::new());
    while let (Some(seconds), Some(nanoseconds), Some(kept), Some(length)) =
        (word(at), word(at + 4), word(at + 8), word(at + 12))
    {
        at += FRAME_HEADER;
        let Some(bytes) = file.get(at..at + kept as usize) else { break };
        let time = u64::from(seconds) * 1_000_000_000 + u64::from(nanoseconds);
        frames.push(Frame { time, capture, bytes: bytes.to_vec(), length: length as usize });
        at += kept as usize;
    }
    frames
}
