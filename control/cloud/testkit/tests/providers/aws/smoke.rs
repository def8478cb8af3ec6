//! What `cloud-smoke` does with a real account.

use std::sync::Arc;
use std::time::Duration;

use vipgate_cloud::CallMeter;
use vipgate_cloud::aws::Aws;

use crate::aws::world::{World, config, vip};
use crate::smoke_flow::Flow;

fn flow(world: &World) -> Flow<Aws> {
    let meter = Arc::<CallMeter>::default();
    let provider = Aws::new(config(&world.fake.url()), meter.clone()).unwrap();
    let (scope, cluster) = (world.scope.clone(), "prod".to_owned());
    Flow { provider, meter, scope, cluster, pause: Duration::from_millis(1) }
}

#[tokio::test]
async fn an_address_is_attached_moved_handed_back_and_given_up() {
    let world = World::new(2).await;
    world.fake.with(|cloud| cloud.set_lag(2));
    let mut steps = Vec::new();
    flow(&world).run(Some(vip(1)), |step| steps.push(step.clone())).await.unwrap();
    let names: Vec<_> = steps.iter().map(|step| step.name).collect();
    assert_eq!(names, ["attach", "fail over", "hand back", "give up"]);
    assert!(steps.iter().all(|step| step.time > Duration::ZERO && !step.changes.is_empty()));
    assert_eq!(steps[1].requests[&("AssociateAddress", "OK".to_owned())], 1);
    assert!(world.homes().is_empty() && world.address(1).await.claim.is_none());
}

#[tokio::test]
async fn an_address_that_it_allocates_is_released() {
    let world = World::new(0).await;
    let mut names = Vec::new();
    flow(&world).run(None, |step| names.push(step.name)).await.unwrap();
    assert_eq!(names, ["allocate", "attach", "fail over", "hand back", "give up"]);
    assert_eq!(world.observe().await.addresses, []);
}

#[tokio::test]
async fn an_address_in_use_is_refused() {
    let world = World::new(1).await;
    world.converge().await;
    let error = flow(&world).run(Some(vip(1)), |_| {}).await.unwrap_err();
    assert_eq!(error, "203.0.113.1 isn't free, or hasn't the tags");
    world.assert_home();
}
