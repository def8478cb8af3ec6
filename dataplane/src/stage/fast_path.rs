//! Fast path: translates a packet of an established, valid and routed session in one pass, as soon as its entry is in
//! the cache. All other packets take the slow path: the later stages do the same and everything else. The order on the
//! wire stays that of the batch.

use crate::flow::ids::Slot;
use crate::flow::key::Key;
use crate::flow::verdict::Verdict;
use crate::io::batch::{Batch, FastPathArrays, PacketKind, PacketSet};
use crate::observe::capture::{Capture, Prefilter};
use crate::policy::Snapshot;
use crate::policy::freshness::SessionAddresses;
use crate::session::Sessions;
use crate::session::entry::Entry;
use crate::stage::context::Context;
use crate::stage::revalidate;
use crate::stage::rewrite::{self, HeaderRewrite};
use crate::wire::{ethernet, tcp};

/// Stale sessions in a batch from which on validating every session of the next batch is cheaper.
const STALE_THRESHOLD: u32 = 8;

/// Whether the session is valid: no policy change since its last validation concerns it.
#[inline]
fn is_valid<A: HeaderRewrite>(entry: &Entry<A>, snapshot: &Snapshot) -> bool {
    let parties = entry.pod_remote_vip();
    snapshot.freshness.is_fresh(entry.generation(), parties) || is_still_permitted(entry, parties, snapshot)
}

/// Whether the policy in force permits a session whose endpoint, or one with the same freshness bucket, has changed.
/// Nothing else has, so its next hop is still right.
#[cold]
#[inline(never)]
fn is_still_permitted<A: HeaderRewrite>(entry: &Entry<A>, parties: SessionAddresses<A>, snapshot: &Snapshot) -> bool {
    snapshot.freshness.is_fresh_except_endpoint(entry.generation(), parties)
        && revalidate::is_permitted(entry, &snapshot.policy)
}

/// Translates packets that don't change the state of their session. Leaves those that a capture may match to the slow
/// path, which copies them.
pub fn run<A: HeaderRewrite>(
    batch: &mut Batch,
    sessions: &mut Sessions,
    capture: Option<&Capture>,
    context: &Context<'_>,
) {
    if batch.undecided_of::<A>().and(batch.plain).is_empty() || context.lease_expired {
        return;
    }
    match capture.map_or(&Prefilter::NoPackets, Capture::prefilter::<A>) {
        Prefilter::NoPackets => run_except::<A>(batch, sessions, |_, _| false, context),
        Prefilter::Prefix(prefix) => {
            run_except::<A>(batch, sessions, |key, entry| prefix.has_address_of(key, entry), context);
        }
        Prefilter::Port(port) => run_except::<A>(batch, sessions, |key, entry| port.has_port_of(key, entry), context),
        Prefilter::Protocol(protocol) => {
            run_except::<A>(batch, sessions, |key, _| key.protocol() == *protocol, context);
        }
        Prefilter::AllPackets => {}
    }
}

/// The same, except for packets that match `may_capture`.
fn run_except<A: HeaderRewrite>(
    batch: &mut Batch,
    sessions: &mut Sessions,
    may_capture: impl Fn(&Key<A>, &Entry<A>) -> bool,
    context: &Context<'_>,
) {
    // While policy changes, some sessions of a batch are stale and others aren't, which defeats branch prediction. Then
    // validating all is cheaper; otherwise only stale ones are validated.
    if batch.expects_stale {
        translate::<A, true>(batch, sessions, may_capture, context);
    } else {
        translate::<A, false>(batch, sessions, may_capture, context);
    }
}

#[allow(clippy::too_many_lines, reason = "the packet's path in one piece: what it reads stays in registers")]
#[inline(never)]
fn translate<A: HeaderRewrite, const VALIDATE_ALL: bool>(
    batch: &mut Batch,
    sessions: &mut Sessions,
    may_capture: impl Fn(&Key<A>, &Entry<A>) -> bool,
    context: &Context<'_>,
) {
    let (exits, snapshot, in_force) =
        (context.snapshot.network.adjacencies(), context.snapshot, context.snapshot.generation);
    let glance = snapshot.freshness.filter();
    let mut stale = 0;
    let table = A::table_mut(sessions);
    let packets = batch.undecided_of::<A>().and(batch.plain);
    let FastPathArrays { frames, headers, segments, keys, slots, directions, verdicts, .. } =
        A::fast_path_arrays(batch);
    let mut done = PacketSet::default();
    // Slots, modulo 64, of both directions of sessions that had a packet left to the slow path: later packets of either
    // direction must not overtake it.
    let mut slow_path_slots = 0_u64;
    let bit = |slot: Slot| 1_u64 << (slot.0 % u64::BITS);
    for i in packets {
        let (head, slot) = (headers[i], slots[i]);
        let entry = table.entry_mut(slot);
        if !entry.has_key(&keys[i]) {
            continue;
        }
        // The first packet of a direction, SYN, FIN, RST and segments out of sequence change the session's state.
        let segment = &segments[i];
        let is_tcp = head.kind == PacketKind::Tcp;
        let changes_state = !entry.flags().is_established_from(head.sides)
            || head.ttl <= 1
            || (is_tcp && (segment.flags.has_syn_fin_rst() || segment.sequence != entry.sequence()));
        if changes_state || slow_path_slots & bit(slot) != 0 {
            slow_path_slots |= bit(slot) | bit(entry.twin());
            continue;
        }
        if may_capture(&keys[i], entry) {
            continue;
        }
        let generation = entry.generation();
        if VALIDATE_ALL {
            stale += u32::from(generation != in_force);
            if !glance.is_fresh(generation, entry.endpoint()) && !is_valid(entry, snapshot) {
                continue;
            }
        } else if generation != in_force {
            stale += 1;
            if !is_valid(entry, snapshot) {
                continue;
            }
        }
        // An exit without a MAC address has an MTU of 0, so no packet fits.
        let Some(exit) = exits.get(usize::from(entry.next_hop_number().0)).filter(|exit| head.ip_length <= exit.mtu)
        else {
            continue;
        };
        let Some(received) = frames.get_mut(i) else { continue };
        let frame = received.frame.bytes_mut();
        if is_tcp {
            let Some(checksum) = A::tcp_checksum(frame) else { continue };
            rewrite::update_checksum(checksum, entry.l4_delta());
            let ack = segment.flags.has(tcp::Flags::ACK).then_some(segment.acknowledgment);
            entry.advance(segment.sequence.wrapping_add(segment.sequence_length), ack);
        }
        entry.count(frame.len() as u16, context.now, in_force);
        let Some((headers, transport)) = A::split(frame) else { continue };
        ethernet::set_macs(headers, &exit.macs);
        A::rewrite_ip_header(headers, entry);
        rewrite::write_ports(transport, entry.translated_ports());
        if !is_tcp {
            rewrite::update_udp_checksum(transport, entry.l4_delta());
        }
        directions[i] = entry.direction();
        verdicts[i] = Verdict::Forward(exit.interface);
        done.insert(i);
    }
    batch.mark_decided(done);
    batch.expects_stale = stale >= STALE_THRESHOLD;
}
