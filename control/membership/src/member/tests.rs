//! A member: in which order a view takes effect.

use super::*;
use crate::fixtures::policy_peer;
use crate::group_state::ReceivedEcho;
use crate::status::Authority;

const TTL: Duration = Duration::from_millis(600);

struct Scenario {
    member: Member,
    now: Instant,
    status: MembershipStatus,
    peers: BTreeMap<Arc<str>, PeerState>,
}

fn view(number: u64) -> Arc<MembershipView> {
    let active = |name: &str| crate::Member { serving: true, incarnation: 1, ..crate::Member::new(name.into(), 1) };
    Arc::new(MembershipView { number, serving_changes: number, members: vec![active("a"), active("b")] })
}

fn gateways() -> Arc<[compiler::Peer]> {
    [policy_peer("a"), policy_peer("b")].into()
}

impl Scenario {
    /// Process 1 or its successor, with a view of both gateways, while the server is away.
    fn new(claim: Claim) -> Self {
        let endpoint = Some("192.0.2.1:4790".parse().unwrap());
        let (name, source) = (Arc::from("a"), MembershipSource::Server);
        let (identity, now) = (Identity { name, endpoint, source, claim: Some(claim) }, Instant::now());
        let published = initial_members(&identity, &gateways(), now, Tick(1000));
        let status = MembershipStatus {
            authority: Authority::Unreachable,
            view: view(7),
            ttl: TTL,
            is_ttl_confirmed: true,
            drain_block: None,
        };
        Self { member: Member::new(&identity, published), now, status, peers: BTreeMap::new() }
    }

    fn echo(&mut self, view: u64) {
        let last_echo = Some(ReceivedEcho { sent: Tick(1000), view });
        self.peers.insert("b".into(), PeerState { linked: true, last_echo, ..PeerState::default() });
    }

    fn observe(&mut self, is_converged: bool) -> Vec<Effect> {
        let observation = Observation {
            tick: Tick(1100),
            policy: PolicyState { gateways: gateways(), version: "v1".into(), awaits_release: false },
            status: Some(self.status.clone()),
            peers: Some(self.peers.clone()),
            tunnels: BTreeMap::new(),
            is_converged,
        };
        self.member.input(self.now, Input::Observed(Box::new(observation)))
    }

    /// Builds the snapshot that is to be published.
    fn publish(&mut self, effects: &[Effect]) {
        let spec = effects.iter().find_map(|it| if let Effect::Publish(spec) = it { Some(spec.clone()) } else { None });
        let snapshot = Snapshot::Members(spec.expect("a membership is published"));
        let input = Input::Published { snapshot, replication_epoch: 2 };
        assert!(self.member.input(self.now, input).is_empty());
    }
}

fn is_extended(effects: &[Effect]) -> bool {
    effects.contains(&Effect::ExtendLease(Tick(1600)))
}

fn process(incarnation: u64) -> Claim {
    Claim::new(incarnation, (1..incarnation).collect())
}

#[test]
fn promises_count_only_under_the_view_that_all_workers_use() {
    let mut it = Scenario::new(process(1));
    it.echo(7);
    let effects = it.observe(false);
    assert!(!is_extended(&effects));
    it.publish(&effects);
    assert!(!is_extended(&it.observe(false)), "it is published");
    it.observe(true);
    assert!(is_extended(&it.observe(true)), "it is applied");
    // A later view, which takes a shard from this gateway, say: workers still use the one from before.
    it.status.view = view(8);
    it.echo(8);
    let effects = it.observe(true);
    assert!(!is_extended(&effects));
    it.publish(&effects);
    it.observe(true);
    assert!(is_extended(&it.observe(true)));
}

#[test]
fn peers_and_server_know_a_view_as_applied_once_all_workers_use_it() {
    let mut it = Scenario::new(process(1));
    let effects = it.observe(false);
    it.publish(&effects);
    let seen = |effects: &[Effect]| {
        let report =
            effects.iter().find_map(|it| if let Effect::Report(state) = it { Some(state.seen_view) } else { None });
        (report, effects.contains(&Effect::UseView(view(7))), effects.contains(&Effect::Resync("b".into())))
    };
    assert_eq!(seen(&it.observe(false)), (Some(0), false, false));
    let effects = it.observe(true);
    assert_eq!(seen(&effects), (Some(7), true, true));
    let released = effects.iter().position(|it| matches!(it, Effect::Release(..)));
    assert!(released > effects.iter().position(|it| matches!(it, Effect::Resync(_))), "after the full sync");
    assert_eq!(seen(&it.observe(true)), (Some(7), false, false), "once");
}

#[test]
fn a_process_takes_its_predecessors_place_once_before_links_use_the_view() {
    let mut it = Scenario::new(process(2));
    let effects = it.observe(false);
    assert_eq!(effects.first(), Some(&Effect::TakePlace));
    it.publish(&effects);
    assert!(!it.observe(true).contains(&Effect::TakePlace));
    let mut it = Scenario::new(process(1));
    assert!(!it.observe(false).contains(&Effect::TakePlace), "the view names this process");
}
