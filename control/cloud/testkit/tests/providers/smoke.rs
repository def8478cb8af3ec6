//! What `cloud-smoke` does with a real account.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use vipgate_cloud::azure::Azure;
use vipgate_cloud::gcp::Gcp;
use vipgate_cloud::{Associate, CallMeter, Provider, Scope};

use crate::smoke_flow::Flow;
use crate::{azure, gcp};

/// With an address that exists, and with one that it allocates: each is attached, moved, handed back, and given up.
async fn run<P: Provider>(provider: P, meter: Arc<CallMeter>, scope: Scope, vip: IpAddr, assert_free: impl Fn()) {
    let flow = Flow { provider, meter, scope, cluster: "prod".to_owned(), pause: Duration::from_millis(1) };
    for (vip, first) in [(Some(vip), "attach"), (None, "allocate")] {
        let mut steps = Vec::new();
        flow.run(vip, |step| steps.push(step.clone())).await.expect("done");
        let names: Vec<_> = steps.iter().map(|step| step.name).collect();
        assert_eq!((names[0], &names[names.len() - 3..]), (first, &["fail over", "hand back", "give up"][..]));
        assert!(steps.iter().all(|it| it.time > Duration::ZERO && !it.changes.is_empty() && !it.requests.is_empty()));
        assert_free();
    }
    let left = flow.provider.observe(&flow.scope).await.expect("an observation").addresses;
    assert!(left.len() == 2 && left.iter().all(|it| it.claim.is_none() && it.attachment.is_none()));
}

#[tokio::test]
async fn of_azure() {
    let bench = azure::bench::Bench::new().await;
    let meter = Arc::<CallMeter>::default();
    let config = azure::bench::config(&bench.server.url(), Associate::Nic);
    let provider = Azure::new(&config, meter.clone()).expect("a configuration");
    run(provider, meter, bench.scope(), [203, 0, 113, 1].into(), || bench.assert_places(None, None)).await;
}

#[tokio::test]
async fn of_google_cloud() {
    let bench = gcp::bench::Bench::new().await;
    let meter = Arc::<CallMeter>::default();
    let provider = Gcp::new(&gcp::bench::config(&bench.server.url()), meter.clone()).expect("a configuration");
    let scope = gcp::bench::Bench::scope();
    run(provider, meter, scope, [203, 0, 113, 1].into(), || assert_eq!(bench.route(), None)).await;
}
