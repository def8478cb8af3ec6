//! Runs the fuzz corpus: generated seeds, and inputs that once failed.
//! `WRITE_CORPUS=1 cargo test -p vipgate --lib fuzz` rewrites the seeds.

use std::fs;
use std::path::{Path, PathBuf};

use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryResponse;
use prost::Message;
use vipgate_dataplane::flow::address::V6;
use vipgate_dataplane::flow::direction::Direction;
use vipgate_dataplane::flow::tuple::Tuple;
use vipgate_dataplane::session::query::{SessionFilter, SessionState};
use vipgate_dataplane::session::record::{DirectionRecord, FamilyRecord, RecordState, ReplicationRecord};

use crate::admin::Request;
use crate::admin::capture::CaptureRequest;
use crate::admin::capture_filter::Expression;
use crate::admin::trace::TraceRequest;
use crate::membership::Secret;
use crate::node::fixtures::policy as node_policy;
use crate::peer::fuzz::{encode, write_frame};
use crate::peer::proto::frame::Kind;
use crate::peer::proto::{Ack, RelayedView, Released, Sessions, SyncBegin, SyncEnd};
use crate::xds::fixtures::{ServerPolicy, response, responses, sample_placement};
use crate::xds::{proto, resource};

fn folder(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target)
}

/// Runs a target with its generated seeds and all files of its corpus; writes the seeds if `WRITE_CORPUS` is set.
fn run_corpus(target: &str, seeds: Vec<(&str, Vec<u8>)>, run: impl Fn(&[u8])) {
    let folder = folder(target);
    for (name, bytes) in seeds {
        if std::env::var_os("WRITE_CORPUS").is_some() {
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join(name), &bytes).unwrap();
        }
        run(&bytes);
    }
    let mut count = 0;
    for file in fs::read_dir(&folder).unwrap() {
        run(&fs::read(file.unwrap().path()).unwrap());
        count += 1;
    }
    assert!(count > 0, "{} is empty", folder.display());
}

fn owned<'a>(texts: &[(&'a str, &str)]) -> Vec<(&'a str, Vec<u8>)> {
    texts.iter().map(|(name, text)| (*name, text.as_bytes().to_vec())).collect()
}

#[test]
fn configuration() {
    let texts = owned(&[
        ("gateway", include_str!("../../../conf/gateway.yaml")),
        ("gateway-served", include_str!("../../../conf/gateway-served.yaml")),
        ("policyd", include_str!("../../../conf/policyd.yaml")),
        ("short", "name: a\ninterfaces: [{name: x, role: both}]\npolicy: {files: [/p]}\n"),
        ("etcd", "source:\n  etcd: {endpoints: [\"http://127.0.0.1:2379\"], prefix: /v/}\nleases: {ttl: 600ms}\n"),
        ("aliases", "a: &a [x,x,x,x]\nb: &b [*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b]\nd: [*c,*c,*c,*c]\n"),
        ("long", "name: &a aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\nb: [*a,*a,*a,*a,*a,*a,*a,*a]\n"),
    ]);
    run_corpus("config", texts, super::config);
}

#[test]
fn manifests() {
    let texts = owned(&[
        ("tenant-a", include_str!("../../../conf/demo/policy/tenant-a.yaml")),
        ("tenant-b", include_str!("../../../conf/demo/policy/tenant-b.yaml")),
        ("tenant-c", include_str!("../../../conf/demo/group/tenant-c.yaml")),
        ("gateways", include_str!("../../../conf/demo/group/gateways.yaml")),
        (
            "pool",
            "apiVersion: vipgate.io/v1alpha1\nkind: AddressPool\nmetadata: {name: p}\nspec: {ranges: \
             [203.0.113.0/28], announce: BGP}\n---\napiVersion: vipgate.io/v1alpha1\nkind: EgressPolicy\nmetadata: \
             {name: e, namespace: n}\nspec:\n  selectors: [{podSelector: {matchLabels: {a: b}}}]\n  pools: [{name: \
             p, count: 2}]\n---\napiVersion: v1\nkind: Pod\nmetadata: {name: x, namespace: n, labels: {a: \
             b}}\nstatus: {phase: Running, podIPs: [{ip: 10.1.0.9}]}\n---\napiVersion: v1\nkind: Node\nmetadata: \
             {name: gw-1}\nspec: {podCIDRs: [10.1.0.0/24]}\n---\napiVersion: vipgate.io/v1alpha1\nkind: \
             OverlayNode\nmetadata: {name: o}\nspec: {address: 10.9.0.1, vni: 7, mac: \"02:00:00:00:00:01\", \
             podCIDRs: [10.1.1.0/24]}\n",
        ),
        (
            "list",
            "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Namespace, metadata: {name: n, labels: \
             {t: u}}}\n- {apiVersion: v1, kind: Service, metadata: {name: s, namespace: n, annotations: \
             {vipgate.io/egress: \"true\", vipgate.io/maglev-table-size: \"16381\"}}, spec: {type: LoadBalancer, \
             sessionAffinity: ClientIP, externalTrafficPolicy: Local, healthCheckNodePort: 30000, \
             loadBalancerSourceRanges: [192.0.2.0/24], ports: [{port: 80, protocol: TCP}]}, status: {loadBalancer: \
             {ingress: [{ip: 203.0.113.9}]}}}\n",
        ),
    ]);
    run_corpus("manifests", texts, super::manifests);
}

#[test]
fn filters() {
    let mut seeds = owned(&[
        ("host", "host 10.1.0.11 and tcp and port 443 and dropped no_session"),
        ("net", "net 10.0.0.0/8 proto 47 in gw-in passed"),
        ("direction", "vip 2001:db8::1 egress"),
    ]);
    let capture = Expression {
        nets: ["10.0.0.0/8", "fd00::1/128"].map(|net| net.parse().unwrap()).into(),
        port: std::num::NonZeroU16::new(53),
        protocol: Some(17),
        interface: Some("gw-out".into()),
        outcome: Some("ports_exhausted".into()),
    };
    seeds.push(("capture", serde_json::to_vec(&capture).unwrap()));
    run_corpus("filter", seeds, super::filter);
}

fn delimited(messages: &[impl Message]) -> Vec<u8> {
    messages.iter().flat_map(Message::encode_length_delimited_to_vec).collect()
}

#[test]
fn resources() {
    let (two, four, none) =
        (ServerPolicy::of(&sample_placement(2)), ServerPolicy::of(&sample_placement(4)), ServerPolicy::default());
    let complete = responses(&two.diff(&none));
    let additions = responses(&four.diff(&two));
    let removals = responses(&two.diff(&four));
    let incomplete = responses(&two.clone().without_settings().diff(&none));
    let settings: DeltaDiscoveryResponse = response(resource::Kind::Settings, &[]);
    let seeds = vec![
        ("whole", delimited(&complete)),
        ("more", delimited(&[complete.clone(), additions.clone()].concat())),
        ("less", delimited(&[complete, additions, removals].concat())),
        ("unsettled", delimited(&[incomplete, vec![settings]].concat())),
    ];
    run_corpus("xds", seeds, super::xds);
}

fn secret(process: u8) -> Secret {
    Secret::new([process; 32])
}

fn view() -> proto::View {
    let member = |name: &str, process| proto::Member {
        name: name.to_owned(),
        serving: true,
        epoch: 4,
        incarnation: secret(process).incarnation(),
        commitment: secret(process).commitment().into(),
        fingerprint: vec![3; 32],
        address: "10.2.0.1".to_owned(),
        port: 4790,
        overlay_address: "10.2.0.11".to_owned(),
        overlay_port: 8472,
        ..proto::Member::default()
    };
    proto::View { number: 5, serving_changes: 3, members: vec![member("a", 1), member("b", 2)] }
}

#[test]
#[allow(clippy::needless_update, reason = "new fields of messages get defaults")]
fn members() {
    use proto::heartbeat::DesiredState;
    let heartbeat = |gateway: &str, process, desired_state: DesiredState, seen_view, known_view| {
        let heartbeat = proto::Heartbeat {
            gateway: gateway.to_owned(),
            incarnation: secret(process).incarnation(),
            secret: secret(process).bytes().to_owned(),
            tunnel_key: vec![2; 32],
            sequence: 1,
            desired_state: desired_state.into(),
            seen_view,
            fingerprint: vec![1; 32],
            peer_address: "10.2.0.1".to_owned(),
            peer_port: 4790,
            overlay_address: "10.2.0.11".to_owned(),
            overlay_port: 8472,
            known_view,
            ..proto::Heartbeat::default()
        };
        [vec![6], heartbeat.encode_length_delimited_to_vec()].concat()
    };
    // All four gateways are in the policy; then one joins, becomes ready, drains.
    let policy = vec![1 | 0xf << 3];
    let stored = view().encode_length_delimited_to_vec();
    let update = proto::MembershipUpdate {
        sequence: 1,
        lease_ms: 540,
        view: Some(view()),
        ..proto::MembershipUpdate::default()
    };
    let joins = heartbeat("a", 1, DesiredState::Joining, 0, 5);
    // The highest number that a member may report: the next view needs a higher one.
    let last = (1 << 61) - 1;
    let seeds = vec![
        (
            "life",
            [
                policy.clone(),
                joins.clone(),
                vec![0xf8, 0xf8],
                heartbeat("a", 1, DesiredState::Ready, 1_000_001, 1_000_001),
                heartbeat("b", 2, DesiredState::Ready, 1_000_001, 1_000_001),
                vec![0x20],
                heartbeat("a", 1, DesiredState::Draining, 1_000_002, 1_000_002),
                heartbeat("b", 9, DesiredState::Ready, 1_000_002, 1_000_002),
            ]
            .concat(),
        ),
        ("store", [policy.clone(), [vec![4], stored].concat(), joins.clone()].concat()),
        (
            "last-number",
            [policy.clone(), joins.clone(), vec![0xf8, 0xf8], heartbeat("b", 3, DesiredState::Ready, 0, last)].concat(),
        ),
        ("notice", [policy, vec![5], update.encode_length_delimited_to_vec(), joins, vec![2, 3]].concat()),
    ];
    run_corpus("members", seeds, super::members);
}

#[test]
#[allow(clippy::needless_update, reason = "new fields of messages get defaults")]
fn node() {
    let policy = |name: &str| {
        let mut policy = node_policy();
        // The gateways of the view.
        (policy.port, policy.gateways) = (8472, ["a", "b"].map(str::to_owned).into());
        policy.pod_cidrs.push("fd00::/64".to_owned());
        name.clone_into(&mut policy.policies[0].name);
        policy.policies[0].destinations.push("::/0".to_owned());
        policy
    };
    let cluster = proto::Cluster {
        pod_cidrs: vec!["10.244.0.0/16".to_owned()],
        service_cidrs: vec!["10.96.0.0/12".to_owned()],
        node_addresses: vec!["192.0.2.102".to_owned()],
        ..proto::Cluster::default()
    };
    let step = |kind: u8, message: Vec<u8>| [vec![kind], message].concat();
    let (cluster, view) =
        (step(1, cluster.encode_length_delimited_to_vec()), step(2, view().encode_length_delimited_to_vec()));
    let named = |name: &str| step(0, policy(name).encode_length_delimited_to_vec());
    let seeds = vec![
        ("life", [named("EgressPolicy a/web"), cluster.clone(), view.clone(), named("Service a/web")].concat()),
        ("view-first", [view, cluster, named("\"; flush ruleset; {")].concat()),
    ];
    run_corpus("node", seeds, super::node);
}

/// One direction of a session record.
fn half(flags: u8) -> DirectionRecord {
    DirectionRecord { flags, idle_ms: 5, sequence: 7, acknowledged: 9, packets: 3, bytes: 180 }
}

/// The record of an open egress session.
fn open_record<A>(origin: Tuple<A>, translated: Tuple<A>) -> FamilyRecord<A> {
    let directions = [half(1), half(2)];
    FamilyRecord { state: RecordState::Open, direction: Direction::Egress, origin, translated, directions }
}

#[test]
fn frames() {
    let v4 = |port| {
        let address = |text: &str| text.parse::<std::net::Ipv4Addr>().unwrap().to_bits();
        let tuple = |source, source_port| Tuple {
            source: address(source),
            destination: address("198.51.100.10"),
            source_port,
            destination_port: 443,
            protocol: 6,
        };
        ReplicationRecord::V4(open_record(tuple("10.244.1.5", 4000), tuple("192.0.2.10", port)))
    };
    let v6 = {
        let address = |text: &str| V6::from_bits(text.parse::<std::net::Ipv6Addr>().unwrap().to_bits());
        let tuple = |source, source_port| Tuple {
            source: address(source),
            destination: address("2001:db8:51::10"),
            source_port,
            destination_port: 53,
            protocol: 17,
        };
        ReplicationRecord::V6(open_record(tuple("fd00:244:1::5", 4000), tuple("2001:db8:1::10", 20_480)))
    };
    let ended = match v4(20_480) {
        ReplicationRecord::V4(record) => ReplicationRecord::V4(FamilyRecord { state: RecordState::Ended, ..record }),
        ReplicationRecord::V6(record) => ReplicationRecord::V6(record),
    };
    let sessions = |number, records: &[ReplicationRecord]| {
        write_frame(Kind::Sessions(Sessions { number, sessions: records.iter().map(encode).collect() }))
    };
    let begin = |number, round| write_frame(Kind::SyncBegin(SyncBegin { number, round, view: 1, applied: Some(0) }));
    let end = |number, round| write_frame(Kind::SyncEnd(SyncEnd { number, round, policy: String::new() }));
    let relayed_view = RelayedView { view: view().encode_to_vec() };
    let others = [
        write_frame(Kind::RelayedView(relayed_view)),
        write_frame(Kind::Ack(Ack { number: 1, refused: false })),
        write_frame(Kind::Released(Released { number: 9, view: 1, policy: "v1".into(), applied: 1, seen: 0 })),
    ];
    let seeds = vec![
        ("round", [begin(1, 9), sessions(2, &[v4(20_480), v6]), end(3, 9), sessions(4, &[ended])].concat()),
        (
            "again",
            [begin(1, 9), sessions(2, &[v4(20_480)]), begin(3, 10), sessions(4, &[v4(20_481)]), end(5, 10)].concat(),
        ),
        ("others", others.concat()),
    ];
    run_corpus("peer", seeds, |data| drop(super::peer(data)));
}

#[test]
fn requests() {
    let request = |request: &Request| {
        let message = serde_json::to_vec(request).unwrap();
        let length = u16::try_from(message.len()).unwrap();
        [&length.to_be_bytes()[..], &message].concat()
    };
    let filter = SessionFilter {
        endpoint: "10.244.1.5".parse().ok(),
        vip: "192.0.2.10".parse().ok(),
        remote: "198.51.100.10".parse().ok(),
        protocol: Some(17),
        state: Some(SessionState::Opening),
    };
    let trace = TraceRequest {
        source: [10, 244, 1, 5].into(),
        source_port: 4000,
        destination: [198, 51, 100, 10].into(),
        destination_port: 443,
        protocol: 6,
        interface: None,
        established: false,
        worker: 0,
        length: 0,
    };
    let reply_trace = TraceRequest {
        source: [198, 51, 100, 10].into(),
        source_port: 0,
        destination: [192, 0, 2, 10].into(),
        destination_port: 0,
        interface: Some("outside".into()),
        established: true,
        length: 1400,
        ..trace.clone()
    };
    let capture = CaptureRequest { snap_length: 64, rate: 10, ..CaptureRequest::default() };
    let seeds = vec![
        (
            "sessions",
            [
                request(&Request::Sessions { filter: filter.clone(), limit: 2 }),
                request(&Request::FlushSessions(filter)),
                request(&Request::Sessions { filter: SessionFilter::default(), limit: 0 }),
            ]
            .concat(),
        ),
        ("trace", [request(&Request::Trace(trace)), request(&Request::Trace(reply_trace))].concat()),
        ("explain", request(&Request::Explain([192, 0, 2, 10].into()))),
        ("capture", [request(&Request::Capture(capture)), request(&Request::Status)].concat()),
        ("drain", request(&Request::Drain { draining: true, dry_run: true })),
    ];
    // Requests need workers to be executed; this only decodes them.
    run_corpus("admin", seeds, |mut data| {
        while let Some((length, rest)) = data.split_first_chunk::<2>() {
            let (message, rest) = rest.split_at(usize::from(u16::from_be_bytes(*length)).min(rest.len()));
            drop(super::request(message));
            data = rest;
        }
    });
}
