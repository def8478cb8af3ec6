//! Who opens connections and says nothing keeps no command from being answered, and orders come from those who may give them.

use std::io;
use std::net::TcpStream;
use std::process::Command;
use std::time::Instant;

use vipgate::listener::raise_descriptors;
use vipgate_tests::World;
use vipgate_tests::policyd::{Plan, Policyd};
use vipgate_tests::tls::{Authority, Certificate, tomorrow};

#[test]
fn idle_connections_to_the_metrics_port_leave_commands_answered() {
    raise_descriptors();
    let world = World::with_gateway("idle");
    // Where the system gives no more than it always did.
    let limit = ["--pid", &world.process().id().to_string(), "--nofile=1024:1024"].map(str::to_owned);
    assert!(Command::new("prlimit").args(limit).status().unwrap().success());
    let begun = Instant::now();
    let connect = || (0..2000).map(|_| TcpStream::connect("127.0.0.1:9469")).collect::<io::Result<Vec<_>>>();
    let idle = world.gateway.run(connect).join().unwrap().unwrap();
    assert_eq!(world.ask(&["status"])["ready"], true);
    assert_eq!([world.answer("/readyz"), world.answer("/healthz")], [200, 200]);
    let open = world.metric("vipgate_connections", "listener=\"metrics\"");
    assert!((1.0..=64.0).contains(&open), "{open} connections of one address");
    assert!(world.metric("vipgate_connections_refused_total", "superseded") > 1900.0);
    // A line at once, and one each ten seconds.
    let lines = world.log().matches("\"event\":\"connections_refused\"").count() as u64;
    assert!((1..=1 + begun.elapsed().as_secs() / 10).contains(&lines), "{}", world.log());
    drop(idle);
}

#[test]
fn orders_come_from_those_who_may_give_them() {
    const URL: &str = "https://127.0.0.1:18000";
    let mut world = World::new("orders");
    let folder = world.folder.path().to_owned();
    let ours = Authority::new(&folder, "ours");
    let server = ours.sign("server", &["127.0.0.1", "localhost"], tomorrow());
    let gateway = ours.sign("gateway", &["gw-test"], tomorrow());
    let operator = ours.sign("operator", &["operator"], tomorrow());
    let tls = format!("tls: {{ca: {}, cert: {}, key: {}}}", ours.file, server.cert, server.key);
    let order = |world: &World, own: &Certificate| {
        let ask = ["--server", URL, "--ca", &ours.file, "--cert", &own.cert, "--key", &own.key];
        let (code, _, stderr) = world.command(&[&["policy", "accept-empty"], &ask[..]].concat());
        assert_eq!(code, 1, "{stderr}");
        stderr
    };
    world.start_policyd(&tls);
    let cache = folder.join("policy.cache").display().to_string();
    let files = format!("ca: {}, cert: {}, key: {}", ours.file, gateway.cert, gateway.key);
    world.start_alone(&format!("policy: {{server: {{url: \"{URL}\", cache: {cache}, {files}}}}}"));
    let said = order(&world, &gateway);
    assert!(said.contains("is of gateway gw-test, and no gateway may do this"), "{said}");
    world.policyd().wait_for_log(&["order_refused", "accept-empty", "gw-test", "127.0.0.1:"]);
    assert!(world.policyd().metric("vipgate_policyd_orders_refused_total", "") > 0.0);
    // Nothing is empty here.
    let said = order(&world, &operator);
    assert!(!said.contains("may do this") && said.contains("empty"), "{said}");
    world.end("TERM");
    world.policyd.take().unwrap().kill();
    world.start_policyd(&format!("{tls}\nadmins: [root]"));
    let said = order(&world, &operator);
    assert!(said.contains("is of operator, and none of that is in the server's `admins`"), "{said}");
    world.policyd.take().unwrap().kill();

    // Without certificates the server's own host is known by its address.
    let listen = "203.0.113.1:18000";
    let policyd = Policyd::start(&world.gateway, &folder, Plan { listen, ..Plan::default() });
    let ask = ["policy", "accept-empty", "--server", &format!("http://{listen}")].map(str::to_owned);
    let ask = ask.each_ref().map(String::as_str);
    let (code, _, said) = world.command(&ask);
    assert!(code == 1 && said.contains("empty") && !said.contains("own host only"), "{said}");
    let program = vipgate_tests::binary().display().to_string();
    let asked = world.router.output(&[&[program.as_str()], &ask[..]].concat()).unwrap_err().to_string();
    assert!(asked.contains("from the server's own host only"), "{asked}");
    policyd.wait_for_log(&["order_refused", "203.0.113.254:"]);
}
