//! Static NAT at the outside edge: of each packet that is received from or sent to the outside, where VIPs have private addresses.

use std::time::Duration;

use vipgate_mem::Frame;

use crate::flow::address::V6;
use crate::flow::ids::InterfaceId;
use crate::io::{FrameAudit, PacketIo, Received};
use crate::policy::Snapshot;
use crate::policy::compiled::Family;
use crate::policy::spec::Role;
use crate::policy::static_nat::StaticNat;
use crate::wire::ethernet;

/// Translates packets that were received just now.
#[inline]
pub(super) fn translate_received(received: &mut [Received], snapshot: &Snapshot) {
    let nat = snapshot.policy.static_nat();
    if nat.is_empty() {
        return;
    }
    for Received { frame, interface } in received {
        if snapshot.network.interface(*interface).role.is_outside() {
            nat.received(frame.bytes_mut());
        }
    }
}

/// A device that translates what is sent to the outside.
pub(super) struct StaticNatIo<'a, Io> {
    io: &'a mut Io,
    /// `None`: nothing is translated.
    nat: Option<&'a StaticNat>,
    snapshot: &'a Snapshot,
}

impl<'a, Io: PacketIo> StaticNatIo<'a, Io> {
    #[inline]
    pub(super) fn new(io: &'a mut Io, snapshot: &'a Snapshot) -> Self {
        let nat = snapshot.policy.static_nat();
        Self { io, nat: (!nat.is_empty()).then_some(nat), snapshot }
    }

    #[cold]
    #[inline(never)]
    fn translate(&self, nat: &StaticNat, interface: InterfaceId, frame: &mut Frame) {
        match self.snapshot.network.interface(interface).role {
            Role::Inside => {}
            // A pod that reaches its own VIP has the VIP as its peer.
            Role::Both if self.is_to_pod(frame.bytes()) => {}
            Role::Outside | Role::Both => nat.sent(frame.bytes_mut()),
        }
    }

    /// Whether a packet is for an endpoint, a backend or another address of the cluster.
    fn is_to_pod(&self, frame: &[u8]) -> bool {
        let Some((header, packet)) = frame.split_first_chunk::<{ ethernet::HEADER }>() else { return false };
        match ethernet::parse(header).1 {
            ethernet::IPV4 => packet
                .get(16..20)
                .and_then(|it| it.first_chunk())
                .is_some_and(|bytes| self.is_inside(u32::from_be_bytes(*bytes))),
            ethernet::IPV6 => packet
                .get(24..40)
                .and_then(|it| it.first_chunk())
                .is_some_and(|bytes| self.is_inside(V6::from_bits(u128::from_be_bytes(*bytes)))),
            _ => false,
        }
    }

    fn is_inside<A: Family>(&self, address: A) -> bool {
        let policy = &self.snapshot.policy;
        policy.is_cluster_address(address) || policy.endpoint(address).is_some() || policy.is_backend(address)
    }
}

impl<Io: PacketIo> PacketIo for StaticNatIo<'_, Io> {
    fn rx(&mut self, into: &mut Vec<Received>, limit: usize) -> usize {
        let before = into.len();
        let count = self.io.rx(into, limit);
        translate_received(&mut into[before..], self.snapshot);
        count
    }

    #[inline]
    fn tx(&mut self, interface: InterfaceId, mut frame: Frame) -> Result<(), Frame> {
        if let Some(nat) = self.nat {
            self.translate(nat, interface, &mut frame);
        }
        self.io.tx(interface, frame)
    }

    fn allocate(&mut self, length: usize) -> Option<Frame> {
        self.io.allocate(length)
    }

    #[inline]
    fn release(&mut self, frame: Frame) {
        self.io.release(frame);
    }

    fn flush(&mut self) {
        self.io.flush();
    }

    fn wait(&mut self, timeout: Duration) {
        self.io.wait(timeout);
    }

    fn audit(&self) -> FrameAudit {
        self.io.audit()
    }
}
