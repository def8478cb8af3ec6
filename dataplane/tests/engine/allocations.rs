//! After startup, workers don't allocate memory for any packet: the allocator may take a lock, and a new page may
//! fault.

use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::policy::spec::OnExhaustion;
use vipgate_dataplane::ports::PortRange;
use vipgate_testkit::*;

/// A deterministic pseudo-random generator (LCG).
struct Lcg(u64);

impl Lcg {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 33) % limit
    }
}

/// Any kind of packet: new and established flows of every protocol and family, replies, hairpins, fragments, packets
/// that cause ICMP errors, unknown MAC addresses, and corrupted ones.
fn random_packet(rng: &mut Lcg) -> (InterfaceId, Vec<u8>) {
    let protocol = [Protocol::Tcp, Protocol::Udp, Protocol::Echo][rng.below(3) as usize];
    let v6 = rng.below(3) == 0;
    let port = 1000 + rng.below(200);
    let (pod, remote, vip) = if v6 {
        let remote = ["[2001:db8:51::1]:53", "[2001:db8::10]:1033", "[2001:db8::99]:53"][rng.below(3) as usize];
        (format!("[fd00:244:1::5]:{port}"), remote, format!("[2001:db8::10]:{port}"))
    } else {
        let remote = ["198.51.100.10:53", "192.0.2.11:1033", "192.0.2.99:53"][rng.below(3) as usize];
        (format!("10.244.1.{}:{port}", 5 + rng.below(2)), remote, format!("192.0.2.10:{port}"))
    };
    let egress = rng.below(2) == 0;
    let mut frame = match (egress, rng.below(4)) {
        (true, 0) => tcp(at(&pod), at(remote), ["A", "FA", "R", "PA"][rng.below(4) as usize], 1001, 5001),
        (true, _) => packet(protocol, at(&pod), at(remote)),
        (false, 0) => tcp(at(remote), at(&vip), ["A", "FA", "R", "SA"][rng.below(4) as usize], 5001, 1001),
        (false, _) => packet(protocol, at(remote), at(&vip)),
    };
    match rng.below(6) {
        // A fragment, or a packet with TTL 1.
        0 if !v6 => {
            frame[20..22].copy_from_slice(&[[0x20, 0], [0, 1], [0x20, 1]][rng.below(3) as usize]);
            update_header_checksum(&mut frame);
        }
        1 => set_ttl(&mut frame, 1),
        2 => {
            let at = rng.below(frame.len() as u64) as usize;
            frame[at] ^= 1 << rng.below(8);
        }
        _ => {}
    }
    (if egress { INSIDE } else { OUTSIDE }, frame)
}

#[test]
fn workers_do_not_allocate_after_startup() {
    let range = PortRange::new(1024, 1151).unwrap();
    let mut gateway = Gateway::new(&Setup { workers: 2, capacity: 512, range, ..Setup::default() });
    gateway.hostile = true;
    gateway.skip_counter_check();
    let mut policies = [policy(), policy()];
    policies[1].policies[0].on_exhaustion = OnExhaustion::Reject;
    policies[1].endpoints.remove(1);
    let mut rng = Lcg(1);
    for round in 0..3_000 {
        for _ in 0..=rng.below(20) {
            let (interface, frame) = random_packet(&mut rng);
            gateway.workers[rng.below(2) as usize].io().inject(interface, &frame);
        }
        gateway.now = gateway.now.plus([0, 1, 50, 700][rng.below(4) as usize]);
        let allocations = allocation_counter::measure(|| (0..3).for_each(|_| gateway.turn()));
        assert_eq!(allocations.count_total, 0, "in round {round}: {:?}", gateway.drops());
        gateway.run();
        if round % 100 == 99 {
            gateway.set_policy(&policies[round / 100 % 2]);
        }
    }
    assert!(
        gateway.sessions() > 0 && gateway.drops().len() > 10,
        "the run covered sessions and many drop reasons: {:?}",
        gateway.drops()
    );
}
