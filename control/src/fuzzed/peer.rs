//! What another gateway may send over a link: frames, and the sessions in them.

use std::sync::Arc;

use futures::FutureExt;
use prost::Message;
use vipgate_dataplane::session::image::Image;

use crate::members::View;
use crate::peer::fuzzed::{Inbound, Rounds, Step, decode, encode, read_frame, write_frame};
use crate::peer::proto::frame::Kind;
use crate::xds::proto;

/// What workers are to take, and the round that it is of; or the end of a round.
#[derive(Clone, Debug)]
pub enum Copies {
    /// Sessions.
    Take(Vec<Image>, u8),
    /// All that this round hasn't named is to be forgotten.
    Purge(u8),
}

/// Bytes as they come over a link, one frame after the other; what of it workers are to take.
pub fn peer(data: &[u8]) -> Vec<Copies> {
    let mut rest = data;
    let mut buffer = Vec::new();
    let mut inbound = Inbound::new(Arc::from("gw-b"), Rounds::default());
    let mut copies = Vec::new();
    let mut last = 0;
    // All is there already: nothing of it waits.
    while let Some(Ok(kind)) = read_frame(&mut rest, &mut buffer).now_or_never() {
        assert!(
            buffer.capacity() <= 2 * data.len().max(1 << 20),
            "a frame's length is looked at before anything is set aside"
        );
        let Some(kind) = kind else { continue };
        let bytes = write_frame(kind.clone());
        let again = read_frame(&mut bytes.as_slice(), &mut Vec::new()).now_or_never();
        assert!(
            matches!(again, Some(Ok(Some(ref again))) if *again == kind),
            "a frame comes back: {kind:?}, {again:?}"
        );
        if let Kind::Hearsay(hearsay) = &kind
            && let Ok(message) = proto::View::decode(&*hearsay.view)
            && let Ok(view) = View::try_from(message)
        {
            assert_eq!(View::try_from(proto::View::from(&view)).as_ref(), Ok(&view));
        }
        let Ok((number, step)) = inbound.frame(&kind) else { continue };
        assert!(number > last, "numbers ascend");
        last = number;
        match step {
            Step::Begin { .. } | Step::Released { .. } => {}
            Step::Take { images, round } => {
                assert!((1..16).contains(&round), "a mark that a copy can have");
                for image in &images {
                    assert_eq!(decode(&encode(image)), Ok(Some(*image)), "a session comes back");
                }
                copies.push(Copies::Take(images, round));
            }
            Step::Purge { round, .. } => {
                inbound.purged(round);
                copies.push(Copies::Purge(round));
            }
        }
    }
    copies
}
