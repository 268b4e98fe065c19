//! Metrics that another crate declares, as in the example of `declare_metrics!`.

use tutti_runtime::metrics::{
    Metrics,
    metrics::{counter::Counter, histogram::Histogram},
};

tutti_runtime::declare_metrics! {
    /// Metrics of a kitchen.
    #[derive(Clone, Debug)]
    struct KitchenMetrics {
        meals: Counter, "meals", "Meals cooked";
        cooking: Histogram = Histogram::new([60.0]), "cooking_seconds", "Seconds per meal";
    }
}

#[test]
fn another_crate_declares_and_registers_metrics() {
    let metrics = Metrics::default();
    let kitchen = metrics.register(KitchenMetrics::register);
    kitchen.meals.inc();
    kitchen.cooking.observe(30.0);
    assert!(metrics.encode().contains("# HELP tutti_meals Meals cooked.\n"));
    assert!(metrics.encode().contains("tutti_meals_total 1\n"));
}
