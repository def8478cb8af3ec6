//! Sizes of the maps in both objects.

use vipgate_dataplane::policy::limits::{
    MAX_BACKEND_PORTS, MAX_CLUSTER_PREFIXES, MAX_EGRESS_PREFIXES, MAX_ENDPOINTS, MAX_VIPS,
};

use super::*;

#[test]
fn the_maps_hold_what_a_policy_may_have() {
    // Each VIP may have a private address. A change holds prefixes of two policies.
    let hosts = MAX_ENDPOINTS + MAX_BACKEND_PORTS + 2 * MAX_VIPS;
    for (name, minimum) in [
        ("hosts", hosts),
        ("listeners", MAX_BACKEND_PORTS),
        ("cidrs", 2 * MAX_EGRESS_PREFIXES),
        ("cluster", 2 * MAX_CLUSTER_PREFIXES),
    ] {
        for object in [OBJECT, MULTI_BUFFER_OBJECT] {
            let program = EbpfLoader::new().load(object).expect("an object; tests of the steering program run as root");
            for family in ["4", "6"] {
                let name = format!("{name}{family}");
                let map = program.map(&name).expect("a map");
                let (aya::maps::Map::HashMap(data) | aya::maps::Map::LpmTrie(data)) = map else {
                    panic!("{name}: {map:?}")
                };
                let size = data.info().expect("its information").max_entries() as usize;
                assert!(size >= minimum, "{name} has {size} entries, a policy may need {minimum}");
            }
        }
    }
}
