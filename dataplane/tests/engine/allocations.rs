//! From its first packet on, a worker asks nobody for memory, whatever comes: the allocator may take a lock, and the next page
//! may be missing.

use crate::support::*;
use vipgate_dataplane::io::InterfaceId;
use vipgate_dataplane::ports::PortRange;
use vipgate_dataplane::snapshot::spec::OnExhaustion;

/// Numbers that look random and are the same in every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 33) % most
    }
}

/// All that can come: new and known flows of every protocol and family, answers, hairpins, fragments, lengths and hops that
/// must be answered, link addresses that nobody has, and each of them broken somewhere.
fn anything(dice: &mut Dice) -> (InterfaceId, Vec<u8>) {
    let protocol = [Protocol::Tcp, Protocol::Udp, Protocol::Echo][dice.below(3) as usize];
    let v6 = dice.below(3) == 0;
    let port = 1000 + dice.below(200);
    let (pod, far, vip) = if v6 {
        let far = ["[2001:db8:51::1]:53", "[2001:db8::10]:1033", "[2001:db8::99]:53"][dice.below(3) as usize];
        (format!("[fd00:244:1::5]:{port}"), far, format!("[2001:db8::10]:{port}"))
    } else {
        let far = ["198.51.100.10:53", "192.0.2.11:1033", "192.0.2.99:53"][dice.below(3) as usize];
        (format!("10.244.1.{}:{port}", 5 + dice.below(2)), far, format!("192.0.2.10:{port}"))
    };
    let out = dice.below(2) == 0;
    let mut frame = match (out, dice.below(4)) {
        (true, 0) => tcp(at(&pod), at(far), ["A", "FA", "R", "PA"][dice.below(4) as usize], 1001, 5001),
        (true, _) => packet(protocol, at(&pod), at(far)),
        (false, 0) => tcp(at(far), at(&vip), ["A", "FA", "R", "SA"][dice.below(4) as usize], 5001, 1001),
        (false, _) => packet(protocol, at(far), at(&vip)),
    };
    match dice.below(6) {
        // A fragment; a packet at its last hop.
        0 if !v6 => {
            frame[20..22].copy_from_slice(&[[0x20, 0], [0, 1], [0x20, 1]][dice.below(3) as usize]);
            seal_header(&mut frame);
        }
        1 => set_ttl(&mut frame, 1),
        2 => {
            let at = dice.below(frame.len() as u64) as usize;
            frame[at] ^= 1 << dice.below(8);
        }
        _ => {}
    }
    (if out { INSIDE } else { OUTSIDE }, frame)
}

#[test]
fn a_worker_needs_no_memory_that_it_did_not_have_when_it_began() {
    let range = PortRange::new(1024, 1151).unwrap();
    let mut gateway = Gateway::new(&Setup { workers: 2, capacity: 512, range, ..Setup::default() });
    gateway.hostile = true;
    gateway.counts_vary();
    let mut policies = [policy(), policy()];
    policies[1].policies[0].on_exhaustion = OnExhaustion::Reject;
    policies[1].endpoints.remove(1);
    let mut dice = Dice(1);
    for round in 0..3_000 {
        for _ in 0..=dice.below(20) {
            let (interface, frame) = anything(&mut dice);
            gateway.workers[dice.below(2) as usize].io().inject(interface, &frame);
        }
        gateway.now = gateway.now.plus([0, 1, 50, 700][dice.below(4) as usize]);
        let turns = allocation_counter::measure(|| (0..3).for_each(|_| gateway.turn()));
        assert_eq!(turns.count_total, 0, "in round {round}: {:?}", gateway.drops());
        gateway.run();
        if round % 100 == 99 {
            gateway.set_policy(&policies[round / 100 % 2]);
        }
    }
    assert!(gateway.sessions() > 0 && gateway.drops().len() > 10, "much has happened: {:?}", gateway.drops());
}
