//! Packets of open sessions, batch by batch. Each offers packets, times one turn of the worker, and looks at what it sent:
//! writing packets and checking them is outside of the time.

use std::marker::PhantomData;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::ValueEnum;
use vipgate_dataplane::batch::MOST;

use crate::Direction;
use crate::group::{self, Tags, Tunnel};
use crate::order::{Draw, Order};
use crate::packets::{self, Flow, PacketFamily, Step};
use crate::rig::{INSIDE, OUTSIDE, Rig};

/// Packets by which a pod's session opens: the first one, its answer, and one that goes on.
pub(crate) const OPENING: u64 = 3;

/// What sessions carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Protocol {
    /// Datagrams.
    Udp,
    /// Connections, opened by a handshake.
    Tcp,
}

/// Packets of the sessions of a rig.
#[derive(Debug)]
pub(crate) struct Load<A> {
    protocol: Protocol,
    size: u16,
    direction: Direction,
    draw: Draw,
    /// The port that each session left with, or the backend that it has.
    ports: Vec<u16>,
    tunnel: Tunnel,
    family: PhantomData<A>,
}

impl<A: PacketFamily> Load<A> {
    /// Opens every session, with [`OPENING`] packets each where it is a pod's.
    pub(crate) fn open(rig: &mut Rig, sessions: u32, size: u16, direction: Direction, order: Order) -> Result<Self> {
        Self::open_with(Protocol::Udp, rig, sessions, size, direction, order)
    }

    /// The same with a protocol: connections open by their handshake. TCP is for pods' sessions only.
    pub(crate) fn open_with(
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
                rig.worker.io().offer(OUTSIDE, size, |frame| A::write_inbound(frame, number));
                rig.worker.turn(rig.now);
                rig.worker.io().collect(|frame| ports.push(A::backend(frame.bytes())));
                // A client that goes on after an answer: until then its session may be taken for one of a flood.
                let backend = ports.last().copied().unwrap_or_default();
                rig.worker.io().offer(INSIDE, size, |frame| A::write_service_reply(frame, number, backend));
                rig.worker.turn(rig.now);
                rig.worker.io().collect(|_| ());
                rig.worker.io().offer(OUTSIDE, size, |frame| A::write_inbound(frame, number));
                rig.worker.turn(rig.now);
                rig.worker.io().collect(|_| ());
            } else {
                let flow = Flow::new(number);
                rig.worker.io().offer(INSIDE, size, |frame| {
                    A::write_forward(frame, flow);
                    if protocol == Protocol::Tcp {
                        packets::make_tcp(frame, true, Step::Opens);
                    }
                });
                rig.worker.turn(rig.now);
                rig.worker.io().collect(|frame| ports.push(A::source_port(frame.bytes())));
                // The first packets of both directions are noted by the slow path; what is measured comes after them.
                let is_answered = matches!(direction, Direction::Forward | Direction::Reply | Direction::Mix);
                if let (true, Some(&port)) = (is_answered, ports.last()) {
                    rig.worker.io().offer(OUTSIDE, size, |frame| {
                        A::write_reply(frame, flow, port);
                        if protocol == Protocol::Tcp {
                            packets::make_tcp(frame, false, Step::Opens);
                        }
                    });
                    rig.worker.turn(rig.now);
                    rig.worker.io().offer(INSIDE, size, |frame| {
                        A::write_forward(frame, flow);
                        if protocol == Protocol::Tcp {
                            packets::make_tcp(frame, true, Step::GoesOn);
                        }
                    });
                    rig.worker.turn(rig.now);
                    rig.worker.io().collect(|_| ());
                }
            }
            ensure!(ports.len() == number as usize + 1, "session {number} was refused: {:?}", rig.drops());
        }
        let (draw, tunnel) = (Draw::new(order, sessions), Tunnel::new(Tags::Without)?);
        Ok(Self { protocol, size, direction, draw, ports, tunnel, family: PhantomData })
    }

    /// What comes out of the tunnel has tags, or none.
    pub(crate) fn set_tags(&mut self, tags: Tags) -> Result<()> {
        self.tunnel = Tunnel::new(tags)?;
        Ok(())
    }

    /// The port of the VIP that the first session left with.
    pub(crate) fn port(&self) -> u16 {
        self.ports[0]
    }

    /// Sends so many packets, in full batches; nanoseconds of each. `each` hears how long each batch took.
    pub(crate) fn round(
        &mut self,
        rig: &mut Rig,
        count: u64,
        mut each: impl FnMut(Duration) -> Result<()>,
    ) -> Result<f64> {
        let mut time = Duration::ZERO;
        let mut packets = 0;
        while packets < count {
            for _ in 0..MOST {
                self.offer(rig);
            }
            let start = Instant::now();
            packets += rig.worker.turn(rig.now) as u64;
            let turn = start.elapsed();
            time += turn;
            each(turn)?;
            self.look(rig, MOST)?;
            // A batch takes microseconds; a clock that the sweep sees moves once in a while.
            if packets.is_multiple_of(1 << 15) {
                rig.now = rig.now.plus(1);
            }
        }
        Ok(time.as_nanos() as f64 / packets as f64)
    }

    /// Sends a packet of every session each way that it is measured in; says how many that are. Nothing is left to do then that waits
    /// for the next packet of a session.
    pub(crate) fn settle(&self, rig: &mut Rig) -> Result<u64> {
        let count = self.ports.len() as u32;
        let ways: &[bool] = if self.direction.is_between_gateways() { &[false] } else { &[true, false] };
        for first in (0..count).step_by(MOST / 2) {
            let numbers = first..count.min(first + MOST as u32 / 2);
            let expected = ways.len() * numbers.len();
            for number in numbers {
                for &forward in ways {
                    self.write(rig, number, forward);
                }
            }
            rig.worker.turn(rig.now);
            self.look(rig, expected)?;
        }
        Ok(ways.len() as u64 * u64::from(count))
    }

    fn offer(&mut self, rig: &mut Rig) {
        let (number, random) = self.draw.next();
        let forward = match self.direction {
            Direction::Forward => true,
            Direction::Reply | Direction::Tunnel | Direction::TunnelCopy | Direction::TunnelIn => false,
            Direction::Mix | Direction::Inbound => random >> 63 == 0,
        };
        self.write(rig, number, forward);
    }

    fn write(&self, rig: &mut Rig, number: u32, forward: bool) {
        let (io, flow) = (rig.worker.io(), Flow::new(number));
        if self.direction == Direction::Inbound {
            if forward {
                io.offer(OUTSIDE, self.size, |frame| A::write_inbound(frame, number));
            } else {
                let backend = self.ports[number as usize];
                io.offer(INSIDE, self.size, |frame| A::write_service_reply(frame, number, backend));
            }
        } else if forward {
            io.offer(INSIDE, self.size, |frame| {
                A::write_forward(frame, flow);
                self.finish(frame, true);
            });
        } else if self.direction == Direction::TunnelIn {
            let (port, tunnel) = (self.ports[number as usize], self.tunnel);
            io.offer(INSIDE, self.size + group::OUTER, |frame| {
                A::write_reply(&mut frame[usize::from(group::OUTER)..], flow, port);
                tunnel.wrap(frame, port);
            });
        } else {
            let flow = if self.direction == Direction::Tunnel { Flow::elsewhere(number) } else { flow };
            io.offer(OUTSIDE, self.size, |frame| {
                A::write_reply(frame, flow, self.ports[number as usize]);
                self.finish(frame, false);
            });
        }
    }

    fn finish(&self, frame: &mut [u8], from_pod: bool) {
        if self.protocol == Protocol::Tcp {
            packets::make_tcp(frame, from_pod, Step::GoesOn);
        }
    }

    /// All packets of a batch came out as they should.
    fn look(&self, rig: &mut Rig, expected: usize) -> Result<()> {
        let travels = matches!(self.direction, Direction::Tunnel | Direction::TunnelCopy);
        let mut right = 0;
        rig.worker.io().collect(|frame| {
            right += usize::from(if travels {
                group::inner(frame.bytes()).is_some_and(A::is_untouched_reply)
            } else if self.protocol == Protocol::Tcp {
                packets::is_right_tcp(frame.bytes())
            } else {
                A::is_right(frame.bytes())
            });
        });
        ensure!(right == expected, "{right} of {expected} packets came out right: {:?}", rig.drops());
        Ok(())
    }
}
