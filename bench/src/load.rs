//! Load generator: packets of established sessions, in batches. For each batch it injects packets, times one iteration
//! of the worker, and verifies the output; only the iteration is timed.

use std::marker::PhantomData;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::ValueEnum;
use vipgate_dataplane::io::batch::BATCH_SIZE;

use crate::packet_order::{Order, SessionPicker};
use crate::packets::{self, Flow, PacketFamily, TcpStep};
use crate::peer_gateway::{Tunnel, TunnelTags};
use crate::rig::{INSIDE, OUTSIDE, Rig};
use crate::{Direction, peer_gateway};

/// Transport protocol of the sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Protocol {
    /// UDP.
    Udp,
    /// TCP, opened by a handshake.
    Tcp,
}

/// Generates packets of the sessions of a worker.
#[derive(Debug)]
pub(crate) struct LoadGenerator<A> {
    protocol: Protocol,
    size: u16,
    direction: Direction,
    draw: SessionPicker,
    /// SNAT port of each egress session, or backend index of each inbound session.
    ports: Vec<u16>,
    tunnel: Tunnel,
    family: PhantomData<A>,
}

impl<A: PacketFamily> LoadGenerator<A> {
    /// Opens all sessions with this protocol. TCP is for egress sessions only.
    pub(crate) fn open(
        protocol: Protocol,
        rig: &mut Rig,
        sessions: u32,
        size: u16,
        direction: Direction,
        order: Order,
    ) -> Result<Self> {
        let mut ports = Vec::with_capacity(sessions as usize);
        for number in 0..sessions {
            if direction == Direction::Inbound {
                rig.worker.io().inject(OUTSIDE, size, |frame| A::write_inbound(frame, number));
                rig.worker.turn(rig.now);
                rig.worker.io().take_sent(|frame| ports.push(A::backend_index(frame.bytes())));
                // A reply and another packet of the client: until then the session is embryonic.
                let backend = ports.last().copied().unwrap_or_default();
                rig.worker.io().inject(INSIDE, size, |frame| A::write_service_reply(frame, number, backend));
                rig.worker.turn(rig.now);
                rig.worker.io().take_sent(|_| ());
                rig.worker.io().inject(OUTSIDE, size, |frame| A::write_inbound(frame, number));
                rig.worker.turn(rig.now);
                rig.worker.io().take_sent(|_| ());
            } else {
                let flow = Flow::new(number);
                rig.worker.io().inject(INSIDE, size, |frame| {
                    A::write_forward(frame, flow);
                    if protocol == Protocol::Tcp {
                        packets::make_tcp(frame, true, TcpStep::Handshake);
                    }
                });
                rig.worker.turn(rig.now);
                rig.worker.io().take_sent(|frame| ports.push(A::source_port(frame.bytes())));
                // The first packets of both directions take the slow path; measured packets must not.
                let has_replies = matches!(direction, Direction::Forward | Direction::Reply | Direction::Mix);
                if let (true, Some(&port)) = (has_replies, ports.last()) {
                    rig.worker.io().inject(OUTSIDE, size, |frame| {
                        A::write_reply(frame, flow, port);
                        if protocol == Protocol::Tcp {
                            packets::make_tcp(frame, false, TcpStep::Handshake);
                        }
                    });
                    rig.worker.turn(rig.now);
                    rig.worker.io().inject(INSIDE, size, |frame| {
                        A::write_forward(frame, flow);
                        if protocol == Protocol::Tcp {
                            packets::make_tcp(frame, true, TcpStep::Established);
                        }
                    });
                    rig.worker.turn(rig.now);
                    rig.worker.io().take_sent(|_| ());
                }
            }
            ensure!(ports.len() == number as usize + 1, "session {number} was rejected: {:?}", rig.drops());
        }
        let (draw, tunnel) = (SessionPicker::new(order, sessions), Tunnel::new(TunnelTags::Disabled)?);
        Ok(Self { protocol, size, direction, draw, ports, tunnel, family: PhantomData })
    }

    /// Enables or disables authentication tags of injected tunnel packets.
    pub(crate) fn set_tags(&mut self, tags: TunnelTags) -> Result<()> {
        self.tunnel = Tunnel::new(tags)?;
        Ok(())
    }

    /// Sends at least `count` packets in full batches; returns nanoseconds per packet. Calls `on_batch` with the
    /// duration of each batch.
    pub(crate) fn run_round(
        &mut self,
        rig: &mut Rig,
        count: u64,
        mut on_batch: impl FnMut(Duration) -> Result<()>,
    ) -> Result<f64> {
        let mut time = Duration::ZERO;
        let mut packets = 0;
        while packets < count {
            for _ in 0..BATCH_SIZE {
                self.inject_next(rig);
            }
            let start = Instant::now();
            packets += rig.worker.turn(rig.now) as u64;
            let elapsed = start.elapsed();
            time += elapsed;
            on_batch(elapsed)?;
            self.verify(rig, BATCH_SIZE)?;
            // A batch takes microseconds, so the engine's clock advances only once in a while.
            if packets.is_multiple_of(1 << 15) {
                rig.now = rig.now.plus(1);
            }
        }
        Ok(time.as_nanos() as f64 / packets as f64)
    }

    /// Sends a packet of every session in each measured direction, so that no session has work pending that is deferred
    /// to its next packet.
    pub(crate) fn send_all_sessions(&self, rig: &mut Rig) -> Result<()> {
        let count = self.ports.len() as u32;
        let directions: &[bool] = if self.direction.involves_peer() { &[false] } else { &[true, false] };
        for first in (0..count).step_by(BATCH_SIZE / 2) {
            let numbers = first..count.min(first + BATCH_SIZE as u32 / 2);
            let expected = directions.len() * numbers.len();
            for number in numbers {
                for &forward in directions {
                    self.inject(rig, number, forward);
                }
            }
            rig.worker.turn(rig.now);
            self.verify(rig, expected)?;
        }
        Ok(())
    }

    fn inject_next(&mut self, rig: &mut Rig) {
        let (number, random) = self.draw.next();
        let forward = match self.direction {
            Direction::Forward => true,
            Direction::Reply | Direction::Tunnel | Direction::TunnelStandby | Direction::TunnelIn => false,
            Direction::Mix | Direction::Inbound => random >> 63 == 0,
        };
        self.inject(rig, number, forward);
    }

    fn inject(&self, rig: &mut Rig, number: u32, forward: bool) {
        let (io, flow) = (rig.worker.io(), Flow::new(number));
        if self.direction == Direction::Inbound {
            if forward {
                io.inject(OUTSIDE, self.size, |frame| A::write_inbound(frame, number));
            } else {
                let backend = self.ports[number as usize];
                io.inject(INSIDE, self.size, |frame| A::write_service_reply(frame, number, backend));
            }
        } else if forward {
            io.inject(INSIDE, self.size, |frame| {
                A::write_forward(frame, flow);
                self.apply_protocol(frame, true);
            });
        } else if self.direction == Direction::TunnelIn {
            let (port, tunnel) = (self.ports[number as usize], self.tunnel);
            io.inject(INSIDE, self.size + peer_gateway::OUTER_HEADERS, |frame| {
                A::write_reply(&mut frame[usize::from(peer_gateway::OUTER_HEADERS)..], flow, port);
                tunnel.encap(frame, port);
            });
        } else {
            let flow = if self.direction == Direction::Tunnel { Flow::peer_owned(number) } else { flow };
            io.inject(OUTSIDE, self.size, |frame| {
                A::write_reply(frame, flow, self.ports[number as usize]);
                self.apply_protocol(frame, false);
            });
        }
    }

    fn apply_protocol(&self, frame: &mut [u8], from_pod: bool) {
        if self.protocol == Protocol::Tcp {
            packets::make_tcp(frame, from_pod, TcpStep::Established);
        }
    }

    /// Verifies that all packets of a batch were sent, correctly translated.
    fn verify(&self, rig: &mut Rig, expected: usize) -> Result<()> {
        let is_tunneled = matches!(self.direction, Direction::Tunnel | Direction::TunnelStandby);
        let mut correct = 0;
        rig.worker.io().take_sent(|frame| {
            correct += usize::from(if is_tunneled {
                peer_gateway::decap(frame.bytes()).is_some_and(A::is_untranslated_reply)
            } else if self.protocol == Protocol::Tcp {
                packets::has_valid_tcp_checksums(frame.bytes())
            } else {
                A::is_translated(frame.bytes())
            });
        });
        ensure!(correct == expected, "{correct} of {expected} packets are correct: {:?}", rig.drops());
        Ok(())
    }
}
