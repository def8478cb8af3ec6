//! What `cloud-smoke` does with a real account.

use std::sync::Arc;
use std::time::Duration;

use vipgate_cloud::azure::Azure;
use vipgate_cloud::{Associate, CallMeter};

use crate::azure::bench::{Bench, VIP_1, config, ip};
use crate::smoke_flow::Flow;

#[tokio::test]
async fn an_address_is_attached_moved_handed_back_and_given_up() {
    let bench = Bench::new().await;
    let meter = Arc::<CallMeter>::default();
    let provider = Azure::new(&config(&bench.server.url(), Associate::Nic), meter.clone()).expect("a configuration");
    let pause = Duration::from_millis(1);
    let flow = Flow { provider, meter, scope: bench.scope(), cluster: "prod".to_owned(), pause };
    for (vip, first) in [(Some(ip(VIP_1)), "attach"), (None, "allocate")] {
        let mut steps = Vec::new();
        flow.run(vip, |step| steps.push(step.clone())).await.expect("done");
        let names: Vec<_> = steps.iter().map(|step| step.name).collect();
        assert_eq!((names[0], &names[names.len() - 3..]), (first, &["fail over", "hand back", "give up"][..]));
        assert!(steps.iter().all(|it| it.time > Duration::ZERO && !it.changes.is_empty() && !it.requests.is_empty()));
        bench.assert_places(None, None);
    }
    let left = bench.addresses().await;
    assert!(left.len() == 2 && left.iter().all(|address| address.claim.is_none()));
}
