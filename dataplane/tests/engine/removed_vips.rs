//! Flows whose VIP is removed from their policy continue with another one.

use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::policy::spec::AddressSelection;
use vipgate_testkit::cluster::*;
use vipgate_testkit::*;

use crate::policy_changes::{add_vip, endpoint, publish_change};

/// The policy with two VIPs for the pod, and without one of them: retired, or only removed from the pod.
fn without(initial: &PolicySet, vip: std::net::IpAddr, is_retired: bool) -> PolicySet {
    let mut set = initial.clone();
    set.endpoints.iter_mut().for_each(|endpoint| endpoint.vips.retain(|own| *own != vip));
    if is_retired {
        set.vips.retain(|own| own.address != vip);
    }
    set
}

#[test]
fn a_flow_takes_another_vip_with_its_next_datagram() {
    for selection in [AddressSelection::PerEndpoint, AddressSelection::PerConnection] {
        for (workers, is_retired) in [(1, true), (1, false), (2, true), (2, false)] {
            let mut initial = policy();
            initial.policies[0].address_selection = selection;
            add_vip(&mut initial, "192.0.2.12");
            endpoint(&mut initial, "10.244.1.5").vips = vec![ip("192.0.2.10"), ip("192.0.2.12")];
            endpoint(&mut initial, "10.244.1.6").vips = vec![ip("192.0.2.12")];
            let mut gateway = Gateway::with(&Setup { workers, ..Setup::default() }, network(), &initial);
            let flow = |n: u16| packet(Protocol::Udp, (ip("10.244.1.5"), 4000 + n).into(), at("198.51.100.10:53"));
            let flows: Vec<_> = (0..40).map(flow).collect();
            let before: Vec<_> = flows.iter().map(|it| gateway.pod_sends(it)).collect();
            let removed = ends(&before[0]).0.ip();
            publish_change(&mut gateway, &initial, &without(&initial, removed, is_retired));
            for (n, (request, before)) in flows.iter().zip(&before).enumerate() {
                let has_moved = ends(before).0.ip() == removed;
                // Either direction finds the change first.
                if n % 2 == 1 && has_moved {
                    assert!(gateway.receive(0, OUTSIDE, &reply_to(before, Protocol::Udp)).is_empty());
                }
                for _ in 0..3 {
                    let sent = gateway.receive(usize::from(workers - 1) * (n / 2 % 2), INSIDE, request);
                    assert_eq!(sent.len(), 1, "{selection:?}, {workers} workers: {:?}", gateway.drops());
                    assert_eq!(ends(&sent[0].1) == ends(before), !has_moved);
                    assert_ne!(ends(&sent[0].1).0.ip(), removed);
                    gateway.remote_sends(&reply_to(&sent[0].1, Protocol::Udp));
                }
            }
            gateway.skip_counter_check();
        }
    }
}

/// All gateways announce both VIPs; the change reaches one after the other.
#[test]
fn a_flow_in_a_group_takes_another_vip_with_its_next_datagram() {
    for (receiver, has_home) in [(0, true), (1, true), (0, false), (1, false), (2, false)] {
        let mut initial = shared_policy(3);
        add_vip(&mut initial, "192.0.2.12");
        endpoint(&mut initial, "10.244.1.5").vips = vec![ip("192.0.2.10"), ip("192.0.2.12")];
        endpoint(&mut initial, "10.244.1.6").vips = vec![ip("192.0.2.12")];
        if !has_home {
            initial.endpoints.iter_mut().for_each(|endpoint| endpoint.gateway = None);
        }
        let mut cluster = three_gateways();
        cluster.gateways.iter_mut().for_each(|gateway| gateway.set_policy(&initial));
        cluster.publish_views();
        let request = packet(Protocol::Udp, at("10.244.1.5:4000"), at(REMOTE));
        let send = |cluster: &mut Cluster| {
            let sent = cluster.receive(receiver, INSIDE, &request);
            assert_eq!(sent.len(), 1, "{:?}", cluster.drops());
            ends(&sent[0].2).0.ip()
        };
        let removed = send(&mut cluster);
        cluster.advance(200);
        cluster.replicate();
        let changed = without(&initial, removed, true);
        for number in [2, 0, 1] {
            cluster.gateways[number].set_policy(&changed);
            send(&mut cluster);
        }
        for _ in 0..3 {
            assert_ne!(send(&mut cluster), removed);
            cluster.advance(200);
            cluster.replicate();
        }
        cluster.skip_counter_check();
    }
}

/// The remote is a pod with a policy of its own, and replies to the former VIP while that is in quarantine.
#[test]
fn a_pods_reply_to_a_removed_vip_has_no_service() {
    let (pod, remote) = (at("10.244.1.5:4000"), at("10.244.1.21:53"));
    let mut gateway = Gateway::new(&Setup::default());
    let first = gateway.receive(0, INSIDE, &packet(Protocol::Udp, pod, remote)).remove(0).1;
    let mut moved = policy();
    endpoint(&mut moved, "10.244.1.5").vips = vec![ip("192.0.2.11")];
    publish_change(&mut gateway, &policy(), &moved);
    for _ in 0..3 {
        assert!(gateway.receive(0, INSIDE, &reply_to(&first, Protocol::Udp)).is_empty());
    }
    assert_eq!(gateway.drops(), [(DropReason::NoService, 3)].into());
    let next = gateway.receive(0, INSIDE, &packet(Protocol::Udp, pod, remote)).remove(0).1;
    assert_eq!(ends(&next).0.ip(), ip("192.0.2.11"));
    gateway.assert_delta("egress 2, drop no_service 3, ended policy 1, created 2");
}
