//! Stateless forwarder in XDP (`forwarder.bpf.c`): the baseline of what veths can carry, without sessions or policy.

use std::net::Ipv4Addr;

use anyhow::{Context, Result};
use aya::maps::{Array, DevMap};
use aya::programs::{Xdp, XdpMode};
use aya::{Ebpf, EbpfLoader};
use nix::net::if_::if_nametoindex;

use super::source::mac_to_u64;
use super::take_map;
use crate::machine::run_on;
use crate::packets::VIP;
use crate::wire::testbed::{INSIDE_MAC, OUTSIDE_MAC, POD, SINK_MAC, SOURCE_MAC, Testbed};

static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/forwarder.bpf.o"));

/// The program of each interface.
const FORWARDING: [(&str, &str); 2] = [("gw-in", "forward_out"), ("gw-out", "forward_in")];

/// Attached programs; detached on drop.
#[derive(Debug)]
pub(super) struct Forwarder {
    _object: Ebpf,
}

impl Forwarder {
    /// Attaches the forwarder to both interfaces of the gateway.
    pub(super) fn start(testbed: &Testbed, core: usize) -> Result<Self> {
        // A veth accepts redirected frames only if its peer receives by NAPI, which GRO or an XDP program enables.
        for host in [&testbed.source, &testbed.sink] {
            host.output(&["ethtool", "-K", "eth0", "gro", "on"])?;
        }
        let object = run_on(&testbed.gateway, core, || {
            let mut object = load()?;
            let mut next_hops: Array<_, [u64; 4]> = take_map(&mut object, "next_hops")?;
            let vip = u64::from(VIP.to_be());
            next_hops.set(0, [mac_to_u64(SINK_MAC), mac_to_u64(OUTSIDE_MAC), vip, 0], 0)?;
            let pod = u64::from(Ipv4Addr::to_bits(POD).to_be());
            next_hops.set(1, [mac_to_u64(SOURCE_MAC), mac_to_u64(INSIDE_MAC), pod, vip], 0)?;
            let mut interfaces: DevMap<_> = take_map(&mut object, "interfaces")?;
            interfaces.set(0, if_nametoindex("gw-out")?, None, 0).context("cannot redirect to gw-out")?;
            interfaces.set(1, if_nametoindex("gw-in")?, None, 0).context("cannot redirect to gw-in")?;
            for (interface, program) in FORWARDING {
                attach(&mut object, program, interface)?;
            }
            Ok(object)
        })?;
        Ok(Self { _object: object })
    }

    /// Attaches a program that drops everything that the source sends.
    pub(super) fn drop_all(testbed: &Testbed, core: usize) -> Result<Self> {
        let object = run_on(&testbed.gateway, core, || {
            let mut object = load()?;
            attach(&mut object, "drop", "gw-in")?;
            Ok(object)
        })?;
        Ok(Self { _object: object })
    }
}

fn load() -> Result<Ebpf> {
    EbpfLoader::new().load(OBJECT).context("cannot load the forwarder's BPF object")
}

fn attach(object: &mut Ebpf, name: &str, interface: &str) -> Result<()> {
    let program = object.program_mut(name).with_context(|| format!("the forwarder has no program {name}"))?;
    let program: &mut Xdp = program.try_into()?;
    program.load().context("the kernel rejected the forwarder's BPF program")?;
    program
        .attach(interface, XdpMode::Driver)
        .with_context(|| format!("cannot attach the forwarder's BPF program to {interface} in native mode"))?;
    Ok(())
}
