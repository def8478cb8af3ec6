//! The provider of Azure against its fake.

#[path = "azure/allocate.rs"]
mod allocate;
#[path = "azure/attach.rs"]
mod attach;
#[path = "azure/bench.rs"]
mod bench;
#[path = "azure/claim.rs"]
mod claim;
#[path = "azure/credentials.rs"]
mod credentials;
#[path = "azure/fault.rs"]
mod fault;
#[path = "azure/instance.rs"]
mod instance;
#[path = "azure/observe.rs"]
mod observe;
#[path = "azure/prepare.rs"]
mod prepare;
#[path = "azure/smoke.rs"]
mod smoke;
#[path = "../examples/cloud-smoke/flow.rs"]
mod smoke_flow;
