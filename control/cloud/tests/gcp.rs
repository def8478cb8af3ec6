//! The provider of Google Cloud against its fake.

#[path = "gcp/allocate.rs"]
mod allocate;
#[path = "gcp/attach.rs"]
mod attach;
#[path = "gcp/bench.rs"]
mod bench;
#[path = "gcp/claim.rs"]
mod claim;
#[path = "gcp/contract.rs"]
mod contract;
#[path = "gcp/credentials.rs"]
mod credentials;
#[path = "gcp/fault.rs"]
mod fault;
#[path = "gcp/observe.rs"]
mod observe;
#[path = "gcp/smoke.rs"]
mod smoke;
#[path = "../examples/cloud-smoke/flow.rs"]
mod smoke_flow;
