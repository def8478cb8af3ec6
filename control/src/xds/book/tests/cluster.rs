//! The cluster's own addresses, as a gateway is offered them beside what its own configuration says.

use super::*;
use crate::manifest::Uncovered;
use crate::policy::Cluster;
use crate::xds::fixtures::deal;

fn cluster(pods: &[&str], uncovered: Option<Uncovered>) -> Cluster {
    let cidrs: Vec<_> = pods.iter().map(|text| text.parse().unwrap()).collect();
    Cluster::of(&cidrs, &[], uncovered)
}

fn spec(pods: &[&str], drop_uncovered: bool) -> ClusterSpec {
    let pods = pods.iter().map(|text| text.parse().unwrap()).collect();
    ClusterSpec { pods, others: vec![], drop_uncovered }
}

fn follow(book: &mut Book, server: &Told, before: &Told, viewer: &Viewer) -> Option<ClusterSpec> {
    for response in responses(&server.differences(before)) {
        book.stage(response).unwrap();
    }
    let change = book.offer(viewer).change;
    book.commit();
    change.cluster
}

#[test]
fn a_gateway_goes_by_what_it_and_its_server_say_from_the_first_policy_on() {
    let viewer = Viewer { cluster: cluster(&["10.1.0.0/16"], None), ..Viewer::named("g1") };
    let with = |cluster: Option<Cluster>| Told::of(&Deal { cluster, ..deal(2) });
    let (none, some) = (with(None), with(Some(cluster(&["10.2.0.0/16"], Some(Uncovered::Pass)))));
    let mut book = Book::default();
    let nothing = Told::default();
    assert_eq!(follow(&mut book, &none, &nothing, &viewer), Some(spec(&["10.1.0.0/16"], true)), "its own alone");
    assert_eq!(follow(&mut book, &some, &none, &viewer), Some(spec(&["10.1.0.0/16", "10.2.0.0/16"], false)));
    // Its own resource is nearer.
    let mut nearer = Deal { cluster: Some(cluster(&["10.2.0.0/16"], Some(Uncovered::Pass))), ..deal(2) };
    nearer.peers[0].uncovered = Some(Uncovered::Drop);
    nearer.peers[0].pods = ["10.3.0.0/16".parse().unwrap()].into();
    let nearer = Told::of(&nearer);
    let all = ["10.1.0.0/16", "10.2.0.0/16", "10.3.0.0/16"];
    assert_eq!(follow(&mut book, &nearer, &some, &viewer), Some(spec(&all, true)));
    assert_eq!(follow(&mut book, &none, &nearer, &viewer), Some(spec(&["10.1.0.0/16"], true)));
    assert_eq!(follow(&mut book, &with(None), &none, &viewer), None, "nothing new");
    // From a cache it is as from a server.
    let mut book = Book::default();
    book.stage_held(some.held.clone()).unwrap();
    assert_eq!(book.offer(&viewer).change.cluster, Some(spec(&["10.1.0.0/16", "10.2.0.0/16"], false)));
}
