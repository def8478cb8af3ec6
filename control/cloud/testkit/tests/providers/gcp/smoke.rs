//! What `cloud-smoke` does with a real account.

use std::sync::Arc;
use std::time::Duration;

use vipgate_cloud::CallMeter;
use vipgate_cloud::gcp::Gcp;

use crate::gcp::bench::{Bench, config, ip};
use crate::smoke_flow::Flow;

#[tokio::test]
async fn an_address_is_attached_moved_handed_back_and_given_up() {
    let bench = Bench::new().await;
    let meter = Arc::<CallMeter>::default();
    let provider = Gcp::new(&config(&bench.server.url()), meter.clone()).expect("a configuration");
    let pause = Duration::from_millis(1);
    let flow = Flow { provider, meter, scope: Bench::scope(), cluster: "prod".to_owned(), pause };
    for (vip, first) in [(Some(ip("203.0.113.1")), "attach"), (None, "allocate")] {
        let mut steps = Vec::new();
        flow.run(vip, |step| steps.push(step.clone())).await.expect("done");
        let names: Vec<_> = steps.iter().map(|step| step.name).collect();
        assert_eq!((names[0], &names[names.len() - 3..]), (first, &["fail over", "hand back", "give up"][..]));
        assert!(steps.iter().all(|it| it.time > Duration::ZERO && !it.changes.is_empty() && !it.requests.is_empty()));
    }
    let left = bench.observe().await.addresses;
    assert!(left.len() == 2 && left.iter().all(|it| it.claim.is_none() && it.attachment.is_none()));
}
