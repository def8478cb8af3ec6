//! Defaults and validation of every field.

use std::time::Duration;

use vipgate_policy::manifest::UncoveredAction;

use super::*;
use crate::schema::Published;
use crate::schema::tests::accepts;

/// Whether the schema of `gateway.yaml` accepts a text.
fn gateway_schema_accepts(text: &str) -> bool {
    schema_accepts(Published::GatewayYaml, text)
}

fn schema_accepts(schema: Published, text: &str) -> bool {
    let (nodes, _) = Source::new("c.yaml", text.to_owned()).documents();
    matches!(nodes.as_slice(), [node] if accepts(schema, node))
}

const MINIMAL: &str = "name: gw-a\ninterfaces: [{name: eth0, role: both}]\npolicy: {files: [p]}\n";

#[test]
fn everything_but_name_interfaces_and_policy_has_a_default() {
    let config = Config::parse("g.yaml", MINIMAL).unwrap();
    assert!(gateway_schema_accepts(MINIMAL));
    assert_eq!(config.node(), "gw-a");
    assert_eq!(config.zone, None);
    assert_eq!(config.workers, Workers { cores: None, idle: Idle::Adaptive });
    assert_eq!(
        config.xdp,
        Xdp {
            mode: XdpMode::Auto,
            zero_copy: ZeroCopy::Auto,
            busy_poll: false,
            on_exit: OnExit::Drop,
            fill_ring: None
        }
    );
    assert_eq!(config.sessions.capacity, 1_048_576);
    assert_eq!(config.sessions.state.as_deref(), Some(Path::new("/dev/shm/vipgate")));
    assert!(config.sessions.require_syn);
    assert_eq!(config.sessions.timeouts.tcp_established, Duration::from_mins(124));
    assert_eq!(config.ports.range.to_string(), "1024-65535");
    assert_eq!(config.ports.quarantine, Duration::from_secs(2));
    assert_eq!((config.peer, config.overlay), (None, None));
    assert_eq!(config.bgp, Bgp { table: 179, metric: None });
    assert_eq!(config.health, Health::default());
    assert!(
        config.health.interval * (config.health.failures + 1) < Duration::from_secs(1),
        "a dead next hop is detected within a second"
    );
    assert!(config.pod_cidrs.is_empty() && config.service_cidrs.is_empty() && config.uncovered.is_none());
    assert_eq!(config.admin.socket, Path::new("/run/vipgate/gateway.sock"));
    assert_eq!(config.metrics.listen.to_string(), "127.0.0.1:9469");
    assert_eq!(config.log, Log { format: LogFormat::Text, level: LogLevel::Info });
}

const EVERY_FIELD: &str = r#"
name: gw-a
node: node-1
zone: zone-1
interfaces:
  - {name: gw-in,  role: inside}
  - {name: gw-out, role: outside}
workers: {cores: [0, 1], idle: spin}
xdp: {mode: generic, zero_copy: never, busy_poll: true, on_exit: pass}
policy:
  server: {url: "https://10.0.0.1:18000", ca: a, cert: b, key: c, cache: /tmp/cache}
sessions:
  capacity: 4096
  state: null
  timeouts: {tcp_established: 2h, tcp_transitory: 4m, udp: 30s, icmp: 500ms, fragment: 1s}
  require_syn: false
ports: {range: 2048-4095, quarantine: 0s}
peer: {address: "2001:db8::1", port: 4791}
bgp: {table: 254, metric: 20}
health:
  {links: any, probe: false, interval: 100ms, failures: 5, hold_down: 1s, hold_down_max: 2m,
   targets: [{interface: gw-out, address: 192.0.2.1}]}
pod_cidrs: [10.244.0.0/16, "fd00:244::/48"]
service_cidrs: [10.96.0.0/12]
uncovered: pass
admin: {socket: /tmp/s}
metrics: {listen: "[::1]:1"}
log: {format: json, level: debug}
"#;

#[test]
fn every_field_can_be_set() {
    let text = EVERY_FIELD;
    let config = Config::parse("g.yaml", text).unwrap();
    assert!(gateway_schema_accepts(text));
    assert_eq!(config.node(), "node-1");
    assert_eq!(config.interfaces[1], Interface { name: "gw-out".into(), role: InterfaceRole::Outside });
    assert_eq!(config.workers, Workers { cores: Some(vec![0, 1]), idle: Idle::Spin });
    assert_eq!(config.sessions.state, None);
    assert_eq!(config.sessions.timeouts.icmp, Duration::from_millis(500));
    assert_eq!(config.ports.range, PortRange { first: 2048, last: 4095 });
    let PolicySource::Server(server) = config.policy else { panic!("a server") };
    assert_eq!(server.cache, Path::new("/tmp/cache"));
    assert_eq!(
        config.peer,
        Some(Peer {
            address: "2001:db8::1".parse().unwrap(),
            port: 4791,
            heartbeat: Duration::from_millis(100),
            replicate_after: Duration::from_millis(50),
        })
    );
    assert_eq!(config.bgp, Bgp { table: 254, metric: Some(20) });
    let targets = vec![HealthTarget { interface: "gw-out".into(), address: "192.0.2.1".parse().unwrap() }];
    let (interval, hold_down) = (Duration::from_millis(100), Duration::from_secs(1));
    let hold_down_max = Duration::from_mins(2);
    let health =
        Health { links: LinkRequirement::Any, probe: false, interval, failures: 5, hold_down, hold_down_max, targets };
    assert_eq!(config.health, health);
    assert_eq!(
        config.pod_cidrs.iter().map(|cidr| cidr.0.to_string()).collect::<Vec<_>>(),
        ["10.244.0.0/16", "fd00:244::/48"]
    );
    assert_eq!((config.service_cidrs.len(), config.uncovered), (1, Some(UncoveredAction::Pass)));
    assert_eq!(config.log, Log { format: LogFormat::Json, level: LogLevel::Debug });
}

/// More lines for `MINIMAL`, and the expected error.
const INVALID_VALUES: &[(&str, &str)] = &[
    ("nmae: x", "g.yaml:4: nmae: unknown field, did you mean `name`?"),
    ("workers: {core: [1]}", "g.yaml:4: workers.core: unknown field, did you mean `cores`?"),
    ("workers: {cores: []}", "g.yaml:4: workers.cores: is empty"),
    ("workers:\n  cores: [1, 2, 1]", "g.yaml:5: workers.cores[2]: core 1 is a duplicate of workers.cores[0]"),
    ("workers: {cores: [-1]}", "g.yaml:4: workers.cores[0]: expected a whole number, not negative, found `-1`"),
    ("workers: {idle: spinning}", "g.yaml:4: workers.idle: unknown value `spinning`, expected `adaptive` or `spin`"),
    (
        "xdp:\n  mode: nativ",
        "g.yaml:5: xdp.mode: unknown value `nativ`, expected `auto`, `native` or `generic`, did you mean `native`?",
    ),
    ("xdp: {fill_ring: 32}", "g.yaml:4: xdp.fill_ring: must be a power of two from 64 to 32768 packets"),
    ("xdp: {fill_ring: 5000}", "g.yaml:4: xdp.fill_ring: must be a power of two from 64 to 32768 packets"),
    ("pod_cidrs: [10.244.0.0]", "g.yaml:4: pod_cidrs[0]: `10.244.0.0` is an address, not a prefix"),
    ("pod_cidrs: [10.244.0.1/16]", "g.yaml:4: pod_cidrs[0]: 10.244.0.1/16 has host bits set"),
    ("pod_cidrs: [a]", "g.yaml:4: pod_cidrs[0]: `a` is not a prefix"),
    (
        "pod_cidrs: [10.244.0.0/16, \"fd00::/8\", 10.244.0.0/16]",
        "g.yaml:4: pod_cidrs[2]: 10.244.0.0/16 is a duplicate of pod_cidrs[0]",
    ),
    ("service_cidrs: [\"::/0\"]", "g.yaml:4: service_cidrs[0]: ::/0 covers every address"),
    ("uncovered: deny", "g.yaml:4: uncovered: unknown value `deny`, expected `drop` or `pass`"),
    ("xdp: {busy_poll: 1}", "g.yaml:4: xdp.busy_poll: expected true or false, found `1`"),
    (
        "sessions: {capacity: 1000, reserve: 501}",
        "g.yaml:4: sessions.reserve: must be at most half of sessions.capacity",
    ),
    ("sessions: {capacity: 0}", "g.yaml:4: sessions.capacity: must be from 1 to"),
    (
        "sessions: {timeouts: {udp: 300}}",
        "g.yaml:4: sessions.timeouts.udp: expected a number and a unit, e.g. 500ms, 5s, 4m or 2h, found `300`",
    ),
    ("sessions: {timeouts: {udp: 5 minutes}}", "g.yaml:4: sessions.timeouts.udp: `5 minutes` is not a duration"),
    ("sessions: {timeouts: {udp: 0s}}", "g.yaml:4: sessions.timeouts.udp: must be longer than 0s"),
    ("ports: {range: 2000-1000}", "g.yaml:4: ports.range: port range 2000-1000 ends before it starts"),
    ("ports: {range: 2000-2010}", "g.yaml:4: ports.range: 2000-2010 has 11 ports, at least 64"),
    ("peer: {address: 0.0.0.0}", "g.yaml:4: peer.address: 0.0.0.0 is not reachable"),
    ("overlay: {address: 0.0.0.0}", "g.yaml:4: overlay.address: 0.0.0.0 is not reachable"),
    ("overlay: {address: 10.0.0.1, port: 0}", "g.yaml:4: overlay.port: must be from 1 to 65535"),
    ("bgp: {table: 255}", "g.yaml:4: bgp.table: 255 is a reserved routing table"),
    ("health: {failures: 0}", "g.yaml:4: health.failures: must be from 1 to 100"),
    ("health: {interval: 1ms}", "g.yaml:4: health.interval: must be from 10ms to 60s"),
    ("health: {hold_down: 2m}", "g.yaml:4: health.hold_down_max: must be at least hold_down"),
    (
        "health: {targets: [{interface: eth9, address: 192.0.2.1}]}",
        "g.yaml:4: health.targets[0].interface: `eth9` is not an interface of this gateway",
    ),
    ("bgp: {metric: 0}", "g.yaml:4: bgp.metric: must be at least 1"),
    ("peer: {address: example.org}", "g.yaml:4: peer.address: "),
    ("metrics: {listen: localhost}", "g.yaml:4: metrics.listen: "),
    ("log: {level: loud}", "g.yaml:4: log.level: unknown value `loud`"),
    ("node: \"\"", "g.yaml:4: node: must not be empty"),
    ("name: gw-b", "g.yaml:4: document: not valid YAML: "),
    ("---\nname: gw-b", "g.yaml:5: document: expected a single document"),
    ("workers:", "g.yaml:4: workers: expected a map, found nothing"),
];

/// Errors that a schema can't describe.
const BEYOND_SCHEMAS: &[&str] = &[
    "must be longer than 0s",
    "ends before it starts",
    "has 11 ports",
    "0.0.0.0 is not reachable",
    "`required` needs",
    "255 is a reserved",
    "has host bits set",
    "covers every address",
    "must be from 10ms",
    "must be at least hold_down",
    "is not an interface of this gateway",
    "at most half of",
];

#[test]
fn invalid_values_are_errors_with_line_field_and_reason() {
    for (more, expected) in INVALID_VALUES {
        let text = format!("{MINIMAL}{more}\n");
        let errors = Config::parse("g.yaml", &text).expect_err(more).to_string();
        assert!(errors.contains(expected), "{more}\ngot: {errors}");
        let accepted_by_schema = BEYOND_SCHEMAS.iter().any(|beyond| expected.contains(beyond));
        assert_eq!(gateway_schema_accepts(&text), accepted_by_schema, "{more}");
    }
}

/// Texts and the expected error.
const INVALID_SOURCES: &[(&str, &str)] = &[
    ("name: a\npolicy: {files: [p]}\n", "g.yaml:1: interfaces: is missing"),
    ("name: a\npolicy: {files: [p]}\ninterfaces: []\n", "g.yaml:3: interfaces: at least one is required"),
    (
        "name: a\npolicy: {files: [p]}\ninterfaces: [{name: i, role: inside}]",
        "g.yaml:3: interfaces: none has role `outside`",
    ),
    (
        "name: a\npolicy: {files: [p]}\ninterfaces: [{name: i, role: outside}]",
        "g.yaml:3: interfaces: none has role `inside`",
    ),
    (
        "name: a\npolicy: {files: [p]}\ninterfaces:\n- {name: i, role: both}\n- {name: i, role: both}",
        "g.yaml:5: interfaces[1].name: `i` is a duplicate of interfaces[0]",
    ),
    (
        "name: a\npolicy: {files: [p]}\ninterfaces: [{name: a/b, role: both}]",
        "interfaces[0].name: `a/b` is not an interface name",
    ),
    ("name: a\npolicy: {files: [p]}\ninterfaces: [{name: a}]", "g.yaml:3: interfaces[0].role: is missing"),
    ("name: a\ninterfaces: [{name: a, role: both}]", "g.yaml:1: policy: is missing"),
    ("name: a\ninterfaces: [{name: a, role: both}]\npolicy: {}", "g.yaml:3: policy: expected exactly one of"),
    (
        "name: a\ninterfaces: [{name: a, role: both}]\npolicy:\n  files: [p]\n  server: {url: u}",
        "policy: expected exactly one of `files` or `server`, found `files`, `server`",
    ),
    ("name: a\ninterfaces: [{name: a, role: both}]\npolicy: {files: []}", "g.yaml:3: policy.files: at least one"),
    (
        "name: a\ninterfaces: [{name: a, role: both}]\npolicy: {server: {url: x}}",
        "policy.server.url: `x` is not a server URL",
    ),
    (
        "name: a\ninterfaces: [{name: a, role: both}]\npolicy: {server: {url: \"https://x:1\", cert: c}}",
        "policy.server.cert: needs `key`",
    ),
    (
        "name: a\ninterfaces: [{name: a, role: both}]\npolicy: {server: {url: \"http://x:1\", ca: c}}",
        "policy.server.ca: needs an https:// URL",
    ),
    (
        "name: a\ninterfaces: [{name: a, role: both}]\npolicy: {server: {url: \"http://x:1\", token: t}}",
        "policy.server.token: needs an https:// URL",
    ),
    ("", "g.yaml: is empty"),
];

#[test]
fn invalid_interfaces_and_policy_sources_are_errors() {
    for (text, expected) in INVALID_SOURCES {
        let errors = Config::parse("g.yaml", text).expect_err(text).to_string();
        assert!(errors.contains(expected), "{text}\ngot: {errors}");
    }
    let missing = Config::load(Path::new("/nonexistent/g.yaml")).unwrap_err().to_string();
    assert!(missing.starts_with("/nonexistent/g.yaml: can't be read: "), "{missing}");
    // The kernel's error stays known: whether it is worth another start.
    let Err(LoadError::Unreadable { source, .. }) = NodeConfig::load(Path::new("/")) else {
        panic!("it is a directory")
    };
    assert_eq!(source.kind(), io::ErrorKind::IsADirectory);
}

#[test]
fn all_errors_are_reported_at_once() {
    let text = "name: a b\ninterfaces: []\npolicy: {files: []}\nports: {range: 1-2}\n";
    let fields: Vec<_> = Config::parse("g.yaml", text).unwrap_err().0.into_iter().map(|it| it.field).collect();
    assert_eq!(fields, ["name", "interfaces", "policy.files", "ports.range"]);
}

#[test]
fn policyd_yaml_has_defaults_and_validation() {
    let config = PolicydConfig::parse("d.yaml", "source: {kubernetes: {}}").unwrap();
    assert!(schema_accepts(Published::PolicydYaml, "source: {kubernetes: {}}"));
    assert_eq!(
        (config.listen.to_string(), config.metrics.listen.to_string()),
        ("127.0.0.1:18000".into(), "127.0.0.1:9470".into())
    );
    assert_eq!(config.leases.ttl, Duration::from_millis(600));
    let text = "source: {kubernetes: {}}\nleases: {ttl: 2s}";
    assert_eq!(PolicydConfig::parse("d.yaml", text).unwrap().leases.ttl, Duration::from_secs(2));
    assert!(schema_accepts(Published::PolicydYaml, text));
    for ttl in ["99ms", "61s"] {
        let text = format!("source: {{kubernetes: {{}}}}\nleases: {{ttl: {ttl}}}");
        let errors = PolicydConfig::parse("d.yaml", &text).expect_err(ttl).to_string();
        assert!(errors.contains("d.yaml:2: leases.ttl: must be from 100ms to 60s"), "{errors}");
    }
    let etcd = PolicydConfig::parse("d.yaml", "source: {etcd: {endpoints: [\"http://127.0.0.1:2379\"]}}").unwrap();
    assert!(matches!(&etcd.source, PolicydSource::Etcd(etcd) if etcd.prefix == "/vipgate/"));
    let PolicydSource::Etcd(etcd) = etcd.source else { panic!("etcd") };
    assert_eq!(
        (etcd.membership_prefix(), etcd.record_key()),
        ("/vipgate-members/".into(), "/vipgate-members/addresses".into())
    );
    let text = "source: {files: [a]}\nstate: /var/lib/x";
    assert_eq!(PolicydConfig::parse("d.yaml", text).unwrap().state, Path::new("/var/lib/x"));
    assert!(schema_accepts(Published::PolicydYaml, text));
    assert_eq!(config.state, Path::new("/var/lib/vipgate/policyd"));
    for (text, expected) in [
        ("source: {files: []}", "d.yaml:1: source.files: at least one"),
        ("listen: \"127.0.0.1:1\"", "d.yaml:1: source: is missing"),
        ("source: {etcd: {endpoints: [x]}}", "d.yaml:1: source.etcd.endpoints[0]: `x` is not a server URL"),
        ("source: {files: [a]}\ntls: {cert: c}", "d.yaml:2: tls.key: is missing"),
        ("source: {files: [a]}\nleases: {ttl: 600}", "d.yaml:2: leases.ttl: "),
        ("source: {files: [a]}\nstate: [a]", "d.yaml:2: state: "),
        ("source: {kubernetes: {x: 1}}", "d.yaml:1: source.kubernetes.x: unknown field"),
        ("source: {kubernetes: {services: {unclassed: x}}}", "d.yaml:1: source.kubernetes.services.unclassed: "),
        ("source: {kubernetes: {namespaces: [a, a]}}", "d.yaml:1: source.kubernetes.namespaces[1]: a is a duplicate"),
    ] {
        let errors = PolicydConfig::parse("d.yaml", text).expect_err(text).to_string();
        assert!(errors.contains(expected), "{text}\ngot: {errors}");
        assert!(!schema_accepts(Published::PolicydYaml, text), "{text}");
    }
}

#[test]
fn node_yaml_has_defaults_and_validation() {
    let text = "name: node-1\nserver: {url: \"https://policy:18000\"}";
    let config = NodeConfig::parse("n.yaml", text).unwrap();
    assert!(schema_accepts(Published::NodeYaml, text));
    assert_eq!((config.mark_mask, config.tunnel.device.as_str()), (0x1f00, "vipgate0"));
    assert_eq!((config.routing.rule_priority, config.routing.first_table), (190, 7680));
    assert_eq!(config.metrics.listen.to_string(), "127.0.0.1:9471");
    assert_eq!(config.server.connection().cache.to_str(), Some("/var/lib/vipgate/node.cache"));
    let server = "server: {url: \"http://policy:18000\"}";
    for (text, expected) in [
        ("name: a b", "n.yaml:1: name: must not be empty or contain whitespace"),
        ("name: a\nmark_mask: 0x3f10", "n.yaml:2: mark_mask: 0x3f10: its bits aren't adjacent"),
        ("name: a\nmark_mask: 3", "n.yaml:2: mark_mask: 0x3: at least 3 bits"),
        ("name: a\nrouting: {rule_priority: 32766}", "n.yaml:2: routing.rule_priority: must be from 1 to 32000"),
        ("name: a\nrouting: {first_table: 254}", "n.yaml:2: routing.first_table: must be from 256"),
        ("name: a\ntunnel: {mtu: 500}", "n.yaml:2: tunnel.mtu: must be from 1280 to 8950"),
        ("name: a\ntunnel: {device: a/b}", "n.yaml:2: tunnel.device: `a/b` is not an interface name"),
        ("name: a\ntunnel: {hold_device: vipgate0}", "n.yaml:2: tunnel.hold_device: is also `tunnel.device`"),
        ("name: a\necho_interval: 1ms", "n.yaml:2: echo_interval: must be from 10ms to 10s"),
        ("name: a\npod_cidrs: [0.0.0.0/0]", "n.yaml:2: pod_cidrs[0]: 0.0.0.0/0 covers every address"),
        ("name: a\nadmin: {socket: \"\"}", "n.yaml:2: admin.socket: must have 1 to"),
        ("name: a\npolicy: {}", "n.yaml:2: policy: unknown field"),
    ] {
        let errors = NodeConfig::parse("n.yaml", &format!("{text}\n{server}")).expect_err(text).to_string();
        assert!(errors.contains(expected), "{text}\ngot: {errors}");
    }
    let errors = NodeConfig::parse("n.yaml", "name: a\nserver: {url: x, cert: c, token: t}").unwrap_err();
    let errors = errors.to_string();
    for expected in [
        "server.url: `x` is not a server URL",
        "server.cert: needs an https:// URL",
        "server.cert: needs `key`",
        "server.token: needs an https:// URL",
    ] {
        assert!(errors.contains(expected), "{errors}");
    }
}
