//! The order of captures, publications and replies, with the program's real maps, which another writer fills.

use std::sync::Mutex;

use aya::maps::lpm_trie::Key;
use aya::maps::{HashMap, LpmTrie, Map, MapData, MapInfo};
use tokio::sync::oneshot::error::TryRecvError;
use vipgate_dataplane::io::frame_layout::FrameLayout;
use vipgate_dataplane::policy::build::Builder;
use vipgate_dataplane::policy::change::{Entries, PolicyChange};
use vipgate_dataplane::policy::compiled::Policy;
use vipgate_dataplane::policy::publish::Publisher;
use vipgate_dataplane::policy::spec::{AddressSelection, EgressSpec, EndpointSpec, Limits, NetworkSpec, OnExhaustion};

use super::super::{Job, rejection};
use super::*;
use crate::xds::client::ClientEvent;

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// The change that adds an endpoint, and the policy if it is the first.
fn adds(address: &str, is_first: bool) -> PolicyUpdate {
    let policy = EgressSpec {
        name: "EgressPolicy t/p".into(),
        destinations: vec!["0.0.0.0/0".parse().unwrap()],
        excluded: vec!["10.9.0.0/16".parse().unwrap()],
        address_selection: AddressSelection::PerEndpoint,
        limits: Limits::default(),
        on_exhaustion: OnExhaustion::Drop,
    };
    let endpoint = EndpointSpec {
        address: ip(address),
        name: "t/pod".into(),
        policy: policy.name.clone(),
        vips: vec![],
        gateway: None,
        slot: None,
        remarks: vec![],
    };
    let policies = is_first.then_some(policy).into_iter().collect();
    let endpoints = vec![endpoint].into();
    let change = PolicyChange { version: address.to_owned(), policies, endpoints, ..Default::default() };
    PolicyUpdate { update_count: 1, change, peers: vec![] }
}

fn removes(address: &str) -> PolicyUpdate {
    let endpoints = Entries::default().without([ip(address)]);
    PolicyUpdate { update_count: 1, change: PolicyChange { endpoints, ..Default::default() }, peers: vec![] }
}

/// The prefix of an address, of a policy that doesn't exist.
fn unused_prefix(n: u32) -> Key<[u8; 8]> {
    let mut prefix = [0xff, 0xff, 0xff, 0xf0, 0, 0, 0, 0];
    prefix[4..].copy_from_slice(&n.to_be_bytes());
    Key::new(64, prefix)
}

struct Setup {
    reconciler: Reconciler,
    state: Arc<crate::state::GatewayState>,
    hosts: HashMap<MapData, [u8; 4], [u32; 2]>,
    /// Policy and destination.
    prefixes: LpmTrie<MapData, [u8; 8], [u8; 2]>,
    /// Addresses without a role that fill the map.
    filled: u32,
}

impl Setup {
    /// Without a policy.
    fn new() -> Self {
        let steering = Steering::load(FrameLayout::Standard).expect("these tests run as root");
        let mut programs = aya::programs::loaded_programs().map(Result::unwrap);
        let program = programs.find(|program| program.id() == steering.program_id()).unwrap();
        let map_ids = program.map_ids().unwrap().unwrap();
        let map = |name: &str| {
            let has_name = |id: &&u32| MapInfo::from_id(**id).is_ok_and(|info| info.name_as_str() == Some(name));
            MapData::from_id(*map_ids.iter().find(has_name).unwrap()).unwrap()
        };
        let hosts = HashMap::try_from(Map::HashMap(map("hosts4"))).unwrap();
        let prefixes = LpmTrie::try_from(Map::LpmTrie(map("cidrs4"))).unwrap();
        let mut builder = Builder::new(NetworkSpec::default());
        let snapshot = builder.with_change(&PolicyChange::default()).unwrap();
        let state = crate::fuzz::state(vec![], snapshot.policy.clone(), NetworkSpec::default());
        let (publisher, steering) = (Publisher::new(snapshot), Arc::new(Mutex::new(steering)));
        let reconciler = Reconciler::new(builder, publisher, steering, state.clone(), vec![], vec![]);
        Self { reconciler, state, hosts, prefixes, filled: 0 }
    }

    fn fill(&mut self) {
        while self.hosts.insert((0xf000_0000 + self.filled).to_be_bytes(), [0, 0], 0).is_ok() {
            self.filled += 1;
        }
    }

    fn empty(&mut self) {
        (0..self.filled).for_each(|n| self.hosts.remove(&(0xf000_0000 + n).to_be_bytes()).unwrap());
        self.filled = 0;
    }

    /// Fills the map of prefixes but for one entry, with entries of a policy that no endpoint has.
    fn fill_prefixes(&mut self) {
        let mut filled = 0;
        while self.prefixes.insert(&unused_prefix(filled), [0, 0], 0).is_ok() {
            filled += 1;
        }
        assert!(filled > 0);
        self.prefixes.remove(&unused_prefix(0)).unwrap();
    }

    /// Runs an update; whether something was published, and the reply.
    fn update(&mut self, update: PolicyUpdate) -> (JobResult, Result<Effect, Rejection>) {
        let (reply, mut replied) = oneshot::channel();
        let result = self.reconciler.run(Job::Policy(ClientEvent::Update(Box::new(update), reply)));
        (result, replied.try_recv().unwrap())
    }

    /// Applies an update that is held.
    fn hold(&mut self, update: PolicyUpdate) -> oneshot::Receiver<()> {
        let (result, reply) = self.update(update);
        let Ok(Effect::Held(in_force)) = reply else { panic!("{reply:?}") };
        assert!(matches!(result, JobResult::Capture), "nothing is published");
        in_force
    }

    /// Endpoints of the published policy, and of the status, sorted.
    fn published(&self) -> Vec<IpAddr> {
        let sorted = |policy: &Policy| {
            let mut addresses: Vec<IpAddr> = policy.endpoints().map(|(address, _)| address).collect();
            addresses.sort_unstable();
            addresses
        };
        let mut reader = self.reconciler.publisher.reader();
        let published = sorted(&reader.read().policy);
        assert_eq!(published, sorted(&self.state.compiled.load()));
        assert_eq!(published, sorted(&self.reconciler.builder.snapshot().policy));
        published
    }

    fn is_complete(&self) -> bool {
        let is_complete = self.state.capture.load().error.is_none();
        assert_eq!(is_complete, self.reconciler.due.is_none(), "it is retried until it is");
        is_complete
    }
}

#[test]
fn an_update_is_published_and_acknowledged_once_it_is_captured() {
    let mut setup = Setup::new();
    let (result, reply) = setup.update(adds("10.0.0.1", true));
    assert!(matches!((result, reply), (JobResult::Policy, Ok(Effect::InForce))));
    setup.fill();
    let mut first = setup.hold(adds("10.0.0.2", false));
    let mut second = setup.hold(adds("10.0.0.3", false));
    for failures in 3..5 {
        assert!(matches!(setup.reconciler.run(Job::Retry), JobResult::Capture));
        assert_eq!((setup.published(), setup.is_complete()), (vec![ip("10.0.0.1")], false));
        assert_eq!(setup.state.capture.load().failures, failures);
        assert_eq!((first.try_recv(), second.try_recv()), (Err(TryRecvError::Empty), Err(TryRecvError::Empty)));
    }
    // An invalid update is rejected, and changes nothing.
    let mut unknown = adds("10.0.0.4", false);
    let mut endpoint = EndpointSpec::clone(unknown.change.endpoints.changed().next().unwrap());
    endpoint.policy = "EgressPolicy t/other".into();
    unknown.change.endpoints.insert(endpoint);
    let (_, reply) = setup.update(unknown);
    assert_eq!(reply.unwrap_err().resource.unwrap().to_string(), "Endpoint 10.0.0.4");
    // The network and its local addresses go on.
    let network = NetworkSpec { locals: vec![ip("10.0.0.254")], ..NetworkSpec::default() };
    setup.reconciler.run(Job::Network(Arc::new(network)));
    assert_eq!((setup.published(), setup.is_complete()), (vec![ip("10.0.0.1")], false));

    setup.empty();
    assert!(matches!(setup.reconciler.run(Job::Retry), JobResult::Policy));
    assert_eq!(setup.published(), ["10.0.0.1", "10.0.0.2", "10.0.0.3"].map(ip));
    assert_eq!((first.try_recv(), second.try_recv(), setup.is_complete()), (Ok(()), Ok(()), true));
    // Nothing is missing in the maps.
    for address in [[10, 0, 0, 1], [10, 0, 0, 2], [10, 0, 0, 3], [10, 0, 0, 254]] {
        setup.hosts.get(&address, 0).unwrap();
    }
    let (result, reply) = setup.update(removes("10.0.0.2"));
    assert!(matches!((result, reply), (JobResult::Policy, Ok(Effect::InForce))));
    assert!(setup.hosts.get(&[10, 0, 0, 2], 0).is_err());
}

#[test]
fn an_update_that_needs_less_replaces_the_one_that_waits() {
    let mut setup = Setup::new();
    setup.update(adds("10.0.0.1", true)).1.unwrap();
    setup.fill();
    let mut first = setup.hold(adds("10.0.0.2", false));
    let (result, reply) = setup.update(removes("10.0.0.2"));
    assert!(matches!((result, reply), (JobResult::Policy, Ok(Effect::InForce))));
    assert_eq!((first.try_recv(), setup.published(), setup.is_complete()), (Ok(()), vec![ip("10.0.0.1")], true));
}

#[test]
fn an_update_whose_second_phase_fails_is_published_and_acknowledged_once_the_maps_have_it() {
    let mut setup = Setup::new();
    // There is room for the excluded prefix, which the first phase writes, and not for the translated one.
    setup.fill_prefixes();
    let (result, reply) = setup.update(adds("10.0.0.1", true));
    let (JobResult::Policy, Ok(Effect::Held(mut first))) = (result, reply) else { panic!("it isn't in force") };
    assert_eq!((setup.published(), setup.is_complete()), (vec![ip("10.0.0.1")], false));
    let (result, reply) = setup.update(adds("10.0.0.2", false));
    let (JobResult::Policy, Ok(Effect::Held(mut second))) = (result, reply) else { panic!("it isn't in force") };
    assert!(matches!(setup.reconciler.run(Job::Retry), JobResult::Capture));
    assert_eq!((setup.published(), setup.is_complete()), (["10.0.0.1", "10.0.0.2"].map(ip).to_vec(), false));
    assert_eq!((first.try_recv(), second.try_recv()), (Err(TryRecvError::Empty), Err(TryRecvError::Empty)));

    (1..10).for_each(|n| setup.prefixes.remove(&unused_prefix(n)).unwrap());
    setup.reconciler.run(Job::Retry);
    assert_eq!((first.try_recv(), second.try_recv(), setup.is_complete()), (Ok(()), Ok(()), true));
}

#[test]
fn an_initial_policy_that_the_maps_cannot_hold_closes_the_program_until_they_do() {
    let mut setup = Setup::new();
    setup.fill();
    let update = adds("10.0.0.1", true);
    let snapshot = setup.reconciler.builder.with_change(&update.change).map_err(|error| rejection(&error)).unwrap();
    setup.state.compiled.store(snapshot.policy.clone());
    let tables = steering_tables::for_policy(&snapshot.policy, &[], &[]);
    setup.reconciler.publisher.publish(snapshot);
    let programmed = setup.reconciler.steering().apply(&tables);
    assert!(programmed.is_err());
    setup.reconciler.steering().set_closed(true).unwrap();
    let (reply, mut replied) = oneshot::channel();
    setup.reconciler.start(programmed, Some(reply));
    let Ok(Ok(Effect::Held(mut in_force))) = replied.try_recv() else { panic!("it isn't in force") };
    let frame: Vec<u8> =
        [[0; 12].as_slice(), &[8, 0, 0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 77, 10, 0, 0, 88], &[0; 8]]
            .concat();
    for (is_closed, result) in [(true, Err(TryRecvError::Empty)), (false, Ok(()))] {
        setup.reconciler.run(Job::Retry);
        assert_eq!((setup.reconciler.is_closed, setup.is_complete()), (is_closed, !is_closed));
        assert_eq!(in_force.try_recv(), result);
        assert_eq!(setup.reconciler.steering().captures(&frame, 1).unwrap(), is_closed, "what isn't covered");
        setup.empty();
    }
}
