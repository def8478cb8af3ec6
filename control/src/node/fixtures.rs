//! What a policy server sends, for tests.

use crate::xds::proto;

/// The policy of node-1: a pod with a VIP, one without, and one that no policy covers.
pub(crate) fn policy() -> proto::NodePolicy {
    let pod = |address: &str, policy, order, has_vip| proto::NodePod {
        address: address.to_owned(),
        name: "tenant-a/web-0".to_owned(),
        policy,
        order,
        has_vip,
    };
    proto::NodePolicy {
        node: "node-1".to_owned(),
        address: "192.0.2.101".to_owned(),
        port: 8473,
        vni: 7,
        mac: vec![0x0a, 0x76, 1, 2, 3, 4],
        pod_cidrs: vec!["10.244.1.0/24".to_owned()],
        policies: vec![proto::EgressPolicy {
            name: "EgressPolicy tenant-a/web".to_owned(),
            destinations: vec!["0.0.0.0/0".to_owned()],
            excluded: vec!["10.0.0.0/8".to_owned()],
            ..proto::EgressPolicy::default()
        }],
        gateways: vec!["gw-a".to_owned(), "gw-b".to_owned()],
        orders: vec![proto::GatewayOrder { gateways: vec![1, 0] }],
        pods: vec![pod("10.244.1.5", 1, 1, true), pod("10.244.1.6", 1, 0, false), pod("fd00::7", 0, 0, false)],
    }
}
