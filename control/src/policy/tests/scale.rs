//! A big cluster: 10 000 Services with 100 000 endpoints, half of them by `EgressPolicy`.

use std::fmt::Write;
use std::time::Instant;

use super::*;

const SERVICES: usize = 10_000;
const ENDPOINTS: usize = 10;

#[test]
#[ignore = "a measurement: cargo test --release -p vipgate --lib scale -- --ignored --nocapture"]
fn a_big_cluster_is_read_and_compiled_in_about_a_second() {
    let mut text = String::new();
    for i in 0..SERVICES {
        let (a, b) = (i / 250, i % 250 + 1);
        let name = format!("s{i}");
        let annotated = if i % 2 == 0 { EGRESS } else { "" };
        let addresses: Vec<_> = (0..ENDPOINTS).map(|k| format!("10.{}.{a}.{b}", 16 + k)).collect();
        let addresses: Vec<_> = addresses.iter().map(String::as_str).collect();
        let _ = writeln!(text, "{}---", service(&name, annotated, 80, &[&format!("203.{a}.113.{b}")]));
        let _ = writeln!(text, "{}---", slice(&name, &addresses));
        if i % 2 == 1 {
            let _ = writeln!(text, "{}---", policy(&name, "", &format!("{{serviceRef: {{name: {name}}}}}")));
        }
    }
    let start = Instant::now();
    let objects = objects(&text);
    let read = start.elapsed();
    let start = Instant::now();
    let compiled = compile(&objects, &Options::default());
    let compile = start.elapsed();
    assert_eq!(compiled.complaints, []);
    assert_eq!((compiled.set.vips.len(), compiled.set.endpoints.len()), (SERVICES, SERVICES * ENDPOINTS));
    println!("{} MB read in {read:?}, {} objects compiled in {compile:?}", text.len() >> 20, objects.len());
}
