#pragma once

/// The tables of sparsity.sqlite (docs/sparsity_patterns.md). Included by patterns.cpp.

namespace tessera::sparsity {

inline constexpr const char* kTables[] = {
    "CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT)",
    "CREATE TABLE matrices (id INTEGER PRIMARY KEY, input TEXT, method TEXT, pattern TEXT, asked TEXT, "
    "matrix TEXT, "
    "layer INTEGER, projection TEXT, rows INTEGER, columns INTEGER, axis TEXT, features INTEGER, length "
    "INTEGER, "
    "sparsity REAL, zero_features INTEGER, one_features INTEGER, duplicate_features INTEGER, unique_features "
    "INTEGER, "
    "pool INTEGER, has_values INTEGER, input_norm_pearson REAL, input_norm_spearman REAL)",
    "CREATE TABLE features (matrix_id INTEGER, feature INTEGER, kept INTEGER, density REAL, norm REAL, "
    "nearest INTEGER, nearest_distance INTEGER, gradient_rank INTEGER, cluster_masks INTEGER, cluster_values "
    "INTEGER, "
    "tsne_x REAL, tsne_y REAL, PRIMARY KEY (matrix_id, feature))",
    "CREATE TABLE nearest_neighbor_metrics (matrix_id INTEGER, feature INTEGER, rank INTEGER, neighbor "
    "INTEGER, "
    "distance INTEGER)",
    "CREATE TABLE distances (matrix_id INTEGER, distance INTEGER, pairs INTEGER)",
    "CREATE TABLE clusters (matrix_id INTEGER, source TEXT, k INTEGER, execution INTEGER, sizes TEXT, "
    "singletons INTEGER, ratio_pairs REAL, ratio_pairs_without_singletons REAL, within_pairs REAL, "
    "between_pairs REAL, "
    "ratio_means REAL, ratio_means_without_singletons REAL, within_means REAL, between_means REAL, inertia "
    "REAL, "
    "balance REAL, coherence REAL, chance_ratio_pairs REAL, chance_singletons INTEGER, "
    "chance_ratio_pairs_without_singletons REAL)",
    "CREATE TABLE cluster_labels (matrix_id INTEGER, source TEXT, k INTEGER, gradient_rank INTEGER, cluster "
    "INTEGER)",
    "CREATE TABLE statistics (matrix_id INTEGER, statistic TEXT, value REAL, PRIMARY KEY (matrix_id, "
    "statistic))",
    "CREATE TABLE pairs (id INTEGER PRIMARY KEY, a_id INTEGER, b_id INTEGER, matrix TEXT, metric TEXT, mean "
    "REAL, "
    "sd REAL, least REAL, largest REAL, low REAL, high REAL, features INTEGER)",
    "CREATE TABLE pair_quantiles (pair_id INTEGER, share REAL, value REAL)",
    "CREATE TABLE nulls (subject TEXT, subject_id INTEGER, statistic TEXT, model TEXT, observed REAL, draws "
    "INTEGER, "
    "mean REAL, sd REAL, low REAL, high REAL, effect REAL, p REAL, p_corrected REAL, within_chance INTEGER)",
    "CREATE TABLE bytes (matrix_id INTEGER, format TEXT, bytes INTEGER, of_dense REAL, bound REAL)",
    "CREATE TABLE skipped_blocks (matrix_id INTEGER, feature_order TEXT, group_size INTEGER, share REAL, "
    "bound REAL)",
    "CREATE TABLE perplexity (input TEXT, text TEXT, value REAL)",
    "CREATE TABLE input_norms (matrix_id INTEGER, column_index INTEGER, norm REAL, kept INTEGER, density "
    "REAL, "
    "PRIMARY KEY (matrix_id, column_index)) WITHOUT ROWID",
    "CREATE TABLE maps (matrix_id INTEGER PRIMARY KEY, height INTEGER, width INTEGER, density BLOB)",
    "CREATE TABLE bits (matrix_id INTEGER PRIMARY KEY, features INTEGER, length INTEGER, words_per_feature "
    "INTEGER, "
    "bits TEXT)",
    "CREATE VIEW cluster_stability AS SELECT matrix_id, source, k, count(*) AS executions, avg(ratio_pairs) "
    "AS "
    "mean_ratio_pairs, CASE WHEN avg(ratio_pairs) > 0 THEN 100.0 * sqrt(max(0.0, (sum(ratio_pairs * "
    "ratio_pairs) - "
    "count(ratio_pairs) * avg(ratio_pairs) * avg(ratio_pairs)) / max(1, count(ratio_pairs) - 1))) / "
    "avg(ratio_pairs) "
    "END AS coefficient_of_variation, avg(singletons) AS mean_singletons, avg(chance_ratio_pairs) AS "
    "mean_chance_ratio_pairs, avg(ratio_pairs_without_singletons) AS mean_ratio_pairs_without_singletons "
    "FROM clusters "
    "GROUP BY matrix_id, source, k",
};

}  // namespace tessera::sparsity
